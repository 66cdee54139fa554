"""Roundings of tools/adapt.py: those of edgekv's kernels on PyTorch's tensors, and the gradients given to them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from edgekv.kernels.contract import attention
from edgekv.kernels.contract.planes import GAUSS_STEP, LARGEST_FOUR

LARGEST_F16 = float(attention.LARGEST_F16)
SIGN_WIDTH = 1.0  # of the bell that stands for a sign's derivative, in standard deviations of the sketch


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """``rounded`` with the gradient of x."""
    return x + (rounded - x).detach()


class Sign(torch.autograd.Function):
    """+-1 of x, elements of about unit variance; the gradient is that of x blurred by Gaussian noise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.bfloat16())
        return torch.where(x >= 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        bell = torch.exp(-0.5 * (x.float() / SIGN_WIDTH).square())
        return gradient * bell * (math.sqrt(2 / math.pi) / SIGN_WIDTH)


def soft_sign(x: Tensor, hardness: float) -> Tensor:
    """tanh(hardness * x), scaled to a mean square of 1 over each head's tokens and bits, as that of signs is.

    x (rows, heads, n, bits), elements of about unit variance. The scale takes no part in the gradient.
    """
    soft = torch.tanh(hardness * x)
    return soft / soft.detach().square().mean((0, 2, 3), keepdim=True).sqrt()


def half(x: Tensor) -> Tensor:
    """The nearest finite float16 of x >= 0."""
    return x.clamp(max=LARGEST_F16).half().float()


def rounded_f16(x: Tensor) -> Tensor:
    return x.half().float()


@torch.no_grad()
def rounded_int4(v: Tensor) -> Tensor:
    """What `kernels.encode_int4` stores: a scale and a zero point per token, 16 levels."""
    low, high = v.amin(-1, keepdim=True).clamp(max=0), v.amax(-1, keepdim=True).clamp(min=0)
    exact = ((high - low) / 15).clamp(max=LARGEST_F16)
    nearest = exact.half()
    up = (nearest.float() < exact).to(torch.int16)
    step = (nearest.view(torch.int16) + up).view(torch.float16).float()
    divisor = step.where(step > 0, 1.0)
    zero = (-low / divisor).round()
    return (((v / divisor).round() + zero).clamp(0, 15) - zero) * step


@torch.no_grad()
def rounded_queries(q: Tensor) -> Tensor:
    """What `kernels.reference.planes.round_queries` makes of q (..., width)."""
    largest = q.abs().unflatten(-1, (-1, 4)).sum(-1).amax(-1, keepdim=True)
    return midpoints(q, largest / LARGEST_FOUR, 128)


@torch.no_grad()
def rounded_means(x: Tensor, size: int) -> Tensor:
    """At each token of x (rows, heads, n, width) the mean of ``size``, as `kernels.encode_centres` stores it."""
    mean = x.unflatten(2, (-1, size)).mean(3)
    return midpoints(mean, half(mean.abs().amax(-1, keepdim=True) / 8), 8).repeat_interleave(size, dim=2)


@torch.no_grad()
def rounded_gauss(x: Tensor, bits: int) -> Tensor:
    """What `kernels.encode_interleaved` stores: uniform levels for a Gaussian, scaled to the length of x."""
    square = x.square().sum(-1, keepdim=True)
    step = (square / x.shape[-1]).sqrt() * GAUSS_STEP[bits]
    levels = midpoints(x / step.where(step > 0, 1.0), torch.ones_like(step), 2 ** (bits - 1))
    along = (x * levels).sum(-1, keepdim=True)
    return levels * half(square / along.where(along > 0, 1.0))


def midpoints(x: Tensor, step: Tensor, top: int) -> Tensor:
    """x rounded to odd multiples of step / 2, ``top`` of them on each side of 0."""
    divisor = step.where(step > 0, 1.0)
    return ((x / divisor).floor().clamp(-top, top - 1) + 0.5) * step
