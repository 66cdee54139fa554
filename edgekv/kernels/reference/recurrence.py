"""Short convolutions and the gated delta rule, token by token: layers that carry a state.

x (n, channels) is the projection of n tokens, all float32 and C-contiguous. Arrays of the state are changed:
they are those before the tokens, and then those behind them. A convolution's weight (L, C) holds the oldest
token's tap first.
"""

import numpy as np

from edgekv.types import F32

LENGTH_EPS = np.float32(1e-6)


def short_conv(x: F32, out: F32, *, window: F32, weight: F32, bias: F32 | None = None) -> None:
    """Fills out (n, C) with c * (conv(b * x) + bias), where x (n, 3C) is b, c and x side by side.

    window (L - 1, C): the products b * x of the latest tokens, the oldest first. bias (C,).
    """
    b, c, inner = np.split(x, 3, axis=1)
    out[:] = _convolve(b * inner, window, weight)
    if bias is not None:
        out += bias
    out *= c


def gated_delta(
    x: F32, out: F32, *, window: F32, matrix: F32, conv: F32, log_decay: F32, time_bias: F32, norm: F32, eps: float
) -> None:
    """Fills out (n, V * Dv) by the gated delta rule over n tokens, then a gated RMS norm of each head.

    x: queries and keys (K heads of Dk channels each), values (V heads of Dv), which the convolution ``conv``
    and SiLU turn into q, k and v; then gates z (V * Dv), and b and a (V each). Queries and keys are divided by
    their lengths (sqrt(sum of squares + 1e-6)), queries by sqrt(Dk) too; V / K value heads share one of these.
    For each token and value head, with S its ``matrix`` (Dk, Dv):

        S *= exp(-exp(log_decay) * softplus(a + time_bias))
        S += outer(k, sigmoid(b) * (v - k S))
        o = q S;   out = o / sqrt(mean(o^2) + eps) * norm * silu(z)

    matrix (V, Dk, Dv), window (L - 1, channels of q, k and v), log_decay and time_bias (V,), norm (Dv,).
    """
    n, (value_heads, key_dim, value_dim) = len(x), matrix.shape
    mixed, convolved = value_heads * value_dim, window.shape[1]
    keys = (convolved - mixed) // 2
    qkv, z, b, a = np.split(x, np.cumsum([convolved, mixed, value_heads]), axis=1)
    q, k, v = np.split(_silu(_convolve(qkv, window, conv)), [keys, 2 * keys], axis=1)
    q, k = (_unit(y.reshape(n, -1, key_dim)) for y in (q, k))
    sharing = value_heads // q.shape[1]
    q, k = (np.repeat(y, sharing, axis=1) for y in (q / np.float32(np.sqrt(key_dim)), k))
    v = v.reshape(n, value_heads, value_dim)
    decay = np.exp(-np.exp(log_decay) * np.logaddexp(np.float32(0), a + time_bias))
    beta = _sigmoid(b)
    sums = np.empty_like(v)
    for t in range(n):
        matrix *= decay[t, :, None, None]
        known = np.einsum("hk,hkv->hv", k[t], matrix)
        matrix += k[t, :, :, None] * (beta[t, :, None] * (v[t] - known))[:, None]
        sums[t] = np.einsum("hk,hkv->hv", q[t], matrix)
    normed = sums / np.sqrt(np.square(sums).mean(axis=-1, keepdims=True) + np.float32(eps)) * norm
    out[:] = normed.reshape(n, -1) * _silu(z)


def _convolve(x: F32, window: F32, weight: F32) -> F32:
    """Returns x (n, C) convolved with the tokens before; the window (L - 1, C) moves on."""
    whole = np.concatenate([window, x])
    out = np.zeros_like(x)
    for i, tap in enumerate(weight):
        out += whole[i : i + len(x)] * tap
    window[:] = whole[len(x) :]
    return out


def _unit(x: F32) -> F32:
    unit: F32 = x / np.sqrt(np.square(x).sum(axis=-1, keepdims=True) + LENGTH_EPS)
    return unit


def _sigmoid(x: F32) -> F32:
    with np.errstate(over="ignore"):  # exp(-x) -> inf gives the right limit, 0
        return (1 / (1 + np.exp(-x))).astype(np.float32)


def _silu(x: F32) -> F32:
    return x * _sigmoid(x)
