"""The live dashboard: one page that shows a federation while it runs, and its past.

`board` folds what a server tells its callbacks into what there is to see; `web` serves it to
browsers from a thread of its own; `folder` makes the same of a state folder. `page` is the page:
plain HTML, CSS and modules, which ask no other host for anything.
"""
