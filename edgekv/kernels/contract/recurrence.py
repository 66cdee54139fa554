"""Kernels of layers that carry a state from token to token, in place of keys and values.

x (n, channels) is the projection of n tokens, all float32 and C-contiguous. Arrays of the state are changed: they
are those before the tokens, and then those behind them. A convolution's weight (L, C) holds the oldest token's tap
first.
"""

from typing import Protocol

from edgekv.types import F32


class RecurrentKernels(Protocol):
    """What `edgekv.models.config` names."""

    def short_conv(self, x: F32, out: F32, *, window: F32, weight: F32, bias: F32 | None = None) -> None:
        """out (n, C) = c * (conv(b * x) + bias), x (n, 3C) being b, c and x side by side.

        window (L - 1, C): the products b * x of the latest tokens, the oldest first. bias (C,).
        """

    def gated_delta(
        self,
        x: F32,
        out: F32,
        *,
        window: F32,
        matrix: F32,
        conv: F32,
        log_decay: F32,
        time_bias: F32,
        norm: F32,
        eps: float,
    ) -> None:
        """out (n, V * Dv): the gated delta rule over n tokens, then a gated RMS norm of each head.

        x: queries and keys (K heads of Dk channels each), values (V heads of Dv), which the convolution ``conv``
        and SiLU turn into q, k and v; then gates z (V * Dv), and b and a (V each). Queries and keys are divided by
        their lengths (sqrt(sum of squares + 1e-6)), queries by sqrt(Dk) too; V / K value heads share one of these.
        For each token and value head, with S its ``matrix`` (Dk, Dv):

            S *= exp(-exp(log_decay) * softplus(a + time_bias))
            S += outer(k, sigmoid(b) * (v - k S))
            o = q S;   out = o / sqrt(mean(o^2) + eps) * norm * silu(z)

        matrix (V, Dk, Dv), window (L - 1, channels of q, k and v), log_decay and time_bias (V,), norm (Dv,).
        """
