"""The seeded faults, each a small mistake as a change may bring it in, and the tests that catch it."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A ``text``, in one place of the package, that becomes ``replacement``; ``tests`` are pytest's arguments.

    The text finds the file, so that a file may move. Where the text itself changes, change it here too; where the
    code goes, put a fault of the same kind in its place.
    """

    what: str
    text: str
    replacement: str
    tests: str


FAULTS = (
    Fault(
        "NumPy's attention: the first visible token is hidden",
        "(at >= lo) & (at < hi)",
        "(at > lo) & (at < hi)",
        "test_attend.py -k outside",
    ),
    Fault(
        "attention: one token too many is seen",
        "or position >= hi:",
        "or position > hi:",
        "test_attend.py -k positions",
    ),
    Fault(
        "attention: splits of a head are combined without their weight",
        "+ L) * other_factor",
        "+ L)",
        "test_attend.py -k sinks",
    ),
    Fault(
        "attention: heads swapped",
        "prepared = p.queries + 4 * g * p.rows",
        "prepared = p.queries + 4 * (p.n_groups - 1 - g) * p.rows",
        "test_attend.py -k outside",
    ),
    Fault("softmax: a coefficient of the exponential", "0.16667114", "0.17667114", "test_kernels_softmax.py"),
    Fault(
        "NumPy's planes: centres half a level off",
        "np.float32(7.5)\n        means *=",
        "np.float32(8)\n        means *=",
        "test_kernels_planes.py",
    ),
    Fault(
        "signed bytes: one level too few",
        "np.array([0, 1, 127]",
        "np.array([0, 1, 126]",
        "test_codecs.py -k same_bits",
    ),
    Fault(
        "weights behind a rotation: levels by a code's own parity",
        "level_tables(bits)[partners & 1, unpacked]",
        "level_tables(bits)[unpacked & 1, unpacked]",
        "test_products.py",
    ),
    Fault(
        "weights behind a rotation: one scale is tried",
        "np.arange(0.84, 1.13, 0.04)",
        "np.arange(1, 1.03, 0.04)",
        "test_rounding.py -k nearly_the_best",
    ),
    Fault(
        "rounding with a text: partners weigh alike",
        "error = lost_x * lost_x + ratio * lost_y",
        "error = lost_x * lost_x + lost_y",
        "test_rounding.py -k formula",
    ),
    Fault(
        "rounding with a text: later columns' errors are added, not made up for",
        "wanted[:, lo:hi] + errors[:, hi:]",
        "wanted[:, lo:hi] - errors[:, hi:]",
        "test_rounding.py -k formula",
    ),
    Fault(
        "CUDA products: a rotation's signs of other inputs",
        "signs = flips[k] >> 4 * u",
        "signs = flips[k] >> 3 * u",
        "test_cuda_kernels.py -k packed_products",
    ),
    Fault(
        "experts: weights renormalized where they are not",
        "if not renormalized:",
        "if renormalized:",
        "test_experts.py",
    ),
    Fault(
        "8-bit weights: the scale of 128 levels",
        "full = -zero if bits == 4 else zero - np.float32(1)",
        "full = -zero if bits == 4 else zero",
        "test_rounding.py -k blocks_are_numpys",
    ),
    Fault(
        "CUDA attention: the first visible token is hidden",
        "at >= lo && at < hi",
        "at > lo && at < hi",
        "test_cuda_attend.py -k 'exact_tokens and f16'",
    ),
    Fault(
        "CUDA attention: the sum of weights is not rescaled",
        "running_sum[i] = running_sum[i] * rescale + p0",
        "running_sum[i] = running_sum[i] + p0",
        "test_cuda_attend.py -k 'odd_ranges and host'",
    ),
    Fault(
        "eviction: earlier attention does not fade",
        "mass *= np.float32(self.decay)",
        "mass *= np.float32(1)",
        "test_kv_eviction.py",
    ),
    Fault(
        "sliding window: one token longer",
        "np.maximum(hi - window, 0)), hi",
        "np.maximum(hi - window - 1, 0)), hi",
        "test_caches.py -k dense_is_exact",
    ),
    Fault(
        "sinks: not read",
        's["sink_value"], 0, self.n_sink)',
        's["sink_value"], 0, 0)',
        "test_kv_planes.py -k attends_to_what_it_stored",
    ),
    Fault(
        "flush: the exact tokens move by one less",
        "store.move(block, self.n_recent, 0)",
        "store.move(block - 1, self.n_recent, 0)",
        "test_caches.py -k 'latest_tokens and planes'",
    ),
    Fault(
        "a prompt: a begun block is packed too",
        "surplus // block * block",
        "-(-surplus // block) * block",
        "test_caches.py -k 'latest_tokens and planes'",
    ),
    Fault(
        "rewind: what was packed later still counts",
        "self.n_stored = min(self.n_stored, self._whole_blocks(held + n_same)) if self.n_seen else 0",
        "pass",
        "test_rewind.py -k 'planes or kivi2'",
    ),
    Fault(
        "ring: positions one too early",
        "0, slot, self.n_seen - slot)",
        "0, slot, self.n_seen - slot - 1)",
        "test_kv_rolling.py",
    ),
    Fault(
        "ring: a rewind behind what is kept",
        "n - self.window < self.n_lost",
        "n < self.n_lost",
        "test_kv_rolling.py",
    ),
    Fault(
        "recurrent state: later snapshots stay",
        "at if at <= found else 0",
        "at",
        "test_recurrent.py -k 'rewind or snapshot'",
    ),
    Fault(
        "a bound on bytes: of bits by order, not of the mixed ones",
        "spec = fit(CacheSpec.parse(kv))",
        "spec = CacheSpec.parse(kv)",
        "test_budget.py",
    ),
    Fault(
        "mixed bits: sliding layers share all layers' mean",
        "for layers in (slides, ~slides):",
        "for layers in (slides | ~slides,):",
        "test_mixed_bits.py -k sliding",
    ),
    Fault(
        "drafts: any is right",
        "self._ahead[0][0] == token and",
        "",
        "test_drafts.py -k 'plain_one and f16 or plain_one and dense'",
    ),
    Fault(
        "top_p: one token too few", "order[: 1 + int(", "order[: int(", "test_sampling.py -k 'definition or top_p'"
    ),
    Fault(
        "stop strings: a start is let through",
        "default=1) - 1",
        "default=1) - 2",
        "test_sampling.py -k stop_strings",
    ),
    Fault(
        "overflow: more stays than there is room for",
        "range(n - (room - sink), n)",
        "range(n - room, n)",
        "test_overflow.py",
    ),
    Fault("an image counts as one token", "at = span.stop", "at += 1", "test_server_images.py"),
    Fault(
        "a session of another model is taken",
        "if model.identity != saved.identity:",
        "if False:",
        "test_session_file.py -k belongs",
    ),
    Fault(
        "a restored sampler begins anew",
        'sampler.load_state(saved["state"])',
        "pass",
        "test_session_file.py -k 'restored_text'",
    ),
    Fault(
        "a session's arrays are not checked",
        'if metadata.get("crc32") != checksum(content, arrays):',
        "if False:",
        "test_session_file.py -k flipped",
    ),
    Fault(
        "several conversations: each gets another's logits",
        "zip(group, np.array(rows), strict=True)",
        "zip(group, np.array(rows)[::-1], strict=True)",
        "test_slots.py -k threads",
    ),
    Fault(
        "chat: the answer's own tokens are forgotten",
        "- len(tokens) + len(ids))\n        calls = [",
        "- len(tokens))\n        calls = [",
        "test_chat.py -k 'computes_only or cache_holds'",
    ),
    Fault(
        "a conversation of another LoRA goes on",
        "if session.lora == lora]",
        "]",
        "test_lora.py -k 'anothers'",
    ),
    Fault(
        "an answer's mark: its beginning is let through",
        "(0 if last else possible_start(self._buffer, [mark]))",
        "0",
        "test_server_tools.py -k 'taken_apart'",
    ),
    Fault(
        "usage: the prompt counts with every answer",
        '{"prompt": 0, "cached": 0} if i % self._request.n else {}',
        "{}",
        "test_server_fields.py -k 'several_answers'",
    ),
    Fault(
        "a stream goes on without its reader",
        "finally:\n        channel.cancelled.set()",
        "finally:\n        pass",
        "test_server_limits.py -k 'vanishes'",
    ),
    Fault(
        "too many connections: the newest goes",
        "next(iter(self._awaited))",
        "next(reversed(self._awaited))",
        "test_server_limits.py -k 'bad_clients'",
    ),
    Fault(
        "any key will do",
        " and hmac.compare_digest(given.strip(), self._key)",
        "",
        "test_server_limits.py -k key",
    ),
    Fault(
        "AWQ: columns in ascending order",
        "AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)",
        "AWQ_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)",
        "test_packed.py -k awq",
    ),
    Fault(
        "llama3's RoPE: long and short wavelengths swapped",
        "(1 - smooth) * freq / factor + smooth * freq",
        "smooth * freq / factor + (1 - smooth) * freq",
        "test_models.py -k 'llama31 and transformers'",
    ),
)
