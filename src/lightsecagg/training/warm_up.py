"""Import this in a fork server: it loads what torch would otherwise load at the first step.

Making an optimiser imports a large part of torch, seconds of work that every forked client would
repeat. Nothing here runs autograd, whose threads would not survive a fork.
"""

from __future__ import annotations

import torch

import lightsecagg.training.builtin_tasks
import lightsecagg.training.server_optimizers
import lightsecagg.training.trainer
import lightsecagg.training.updates  # noqa: F401 - imported for those that fork from here


def _load_optimiser() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.1).step()


_load_optimiser()
