"""`python -m lightsecagg`: the command line."""

from __future__ import annotations

from lightsecagg.cli.main import main

if __name__ == "__main__":
    main()
