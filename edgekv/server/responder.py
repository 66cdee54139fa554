"""One answer, from its prompt to its last token; runs in the engine's thread."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from edgekv.chat.conversation import answer_ids
from edgekv.errors import ConfigError
from edgekv.server.checked_request import CheckedRequest
from edgekv.server.energy import ServerEnergy
from edgekv.server.images import Images
from edgekv.server.jobs import AnswerEnd, EmbeddingJob, EmbeddingVector, Job, Piece, PromptProgress, Usage
from edgekv.server.metrics import Metrics
from edgekv.server.pool import SessionPool
from edgekv.server.protocol import RequestError
from edgekv.server.request_encoder import RequestEncoder
from edgekv.server.timings import Timings
from edgekv.server.tools import tools_grammar
from edgekv.session.generation import Step
from edgekv.session.grammar import Constraint, Grammar, JsonSchema
from edgekv.session.logprobs import TokenLogprob, token_logprob
from edgekv.session.report import RunReport
from edgekv.session.sampling import Sampler
from edgekv.session.session import Session
from edgekv.vision.prompt import Prompt

LOGITS_AT_ONCE = 64  # tokens of an echoed prompt whose logits are in memory


class Responder:
    """Answers with the sessions of a pool. max_new_tokens: of an answer whose request sets no limit."""

    def __init__(
        self,
        pool: SessionPool,
        prompts: RequestEncoder,
        metrics: Metrics,
        energy: ServerEnergy,
        max_new_tokens: int,
    ) -> None:
        self._pool, self._prompts, self._metrics, self._energy = pool, prompts, metrics, energy
        self._max_new_tokens, self._images = max_new_tokens, Images(pool.base)

    def answer(self, job: Job) -> AnswerEnd:
        """Emits the text; returns the end. Raises Cancelled, and an EdgeKVError where it can't be made."""
        prompt = self._images.placed(job.prompt.ids, job.prompt.images)
        session, new = self._pool.acquire(prompt, job.lora)
        try:
            if job.request.echo:
                new = self._echo(job, session, prompt, new)
                if job.request.max_tokens == 0:
                    return AnswerEnd(job.index, "length", Usage(len(job.prompt.ids)))
            return self._generate(job, session, new)
        finally:
            self._pool.release(session)

    def embed(self, job: EmbeddingJob) -> EmbeddingVector:
        """The text as a vector."""
        session = self._pool.borrow(job.lora)
        try:
            values = session.embed(job.ids)
        finally:
            self._pool.release(session)
        self._metrics.prompt_tokens.inc(len(job.ids))
        return EmbeddingVector(job.index, values.tolist(), len(job.ids))

    def _echo(self, job: Job, session: Session, prompt: Prompt, new: Prompt) -> Prompt:
        """Emits the prompt; with the log probabilities of its tokens, for which all of it is read again."""
        ids, n_top = job.prompt.ids, job.request.n_logprobs
        if n_top is None:
            job.channel.emit(Piece(job.index, job.prompt.text))
            return new
        session.rewind(0)
        found: list[TokenLogprob | None] = [None]
        for a in range(0, len(ids) - 1, LOGITS_AT_ONCE):
            job.channel.check()
            b = min(a + LOGITS_AT_ONCE, len(ids) - 1)
            rows = session.logits(ids[a:b])
            found += [token_logprob(row, i, n_top) for row, i in zip(rows, ids[a + 1 : b + 1], strict=True)]
        job.channel.emit(Piece(job.index, job.prompt.text, found))
        return session.align(prompt)

    def _generate(self, job: Job, session: Session, new: Prompt) -> AnswerEnd:
        request, metered = job.request, None
        made: list[Step] = []
        sampler = Sampler(request.sampling_of(job.choice), session.config.vocab_size, request.n_logprobs)
        n_held = len(session.tokens)
        n_new = sum(1 if isinstance(piece, int) else len(piece.rows) for piece in new)
        n_read = n_held if request.echo and request.n_logprobs is not None else 0  # for the echo, a moment ago
        watched = request.timings or request.return_progress
        timings = Timings(session, n_held + n_new, n_read, watched=watched)
        out = _Output(job, sampler, self._prompts, timings)

        def progress(layer: int, n_layers: int) -> None:
            job.channel.check()
            if request.return_progress and (values := timings.prefill(layer, n_layers)) is not None:
                job.channel.emit(PromptProgress(job.index, values))

        steps = session.generate(
            new,
            max_new_tokens=min(request.max_tokens or self._max_new_tokens, session.plan.ctx),
            sampling=sampler,
            stop=(*self._prompts.template.stops, *request.stop) if request.messages is not None else request.stop,
            constraint=self._constraint(request, session),
            progress=progress,
        )
        try:
            with contextlib.closing(steps):
                for step in steps:
                    metered = metered or self._energy.begin()
                    made.append(step)
                    out.step(step)
                    job.channel.check()
        finally:
            joules, watts = metered.end() if metered else (None, None)
            n_kept = self._remember(session, made)
            usage = self._count(session.report(), n_held + n_new, timings.n_cached, joules, watts)
        out.end(n_kept)
        return AnswerEnd(
            job.index, made[-1].finish_reason or "length", usage, timings.end() if request.timings else None
        )

    def _constraint(self, request: CheckedRequest, session: Session) -> Constraint | None:
        tokenizer, vocab_size = self._prompts.tokenizer, session.config.vocab_size
        if request.tools is not None and request.tools.callable:
            try:
                grammar = tools_grammar(request.tools, self._prompts.form, self._prompts.marks, request.schema)
                return Grammar(grammar, tokenizer, vocab_size)
            except ConfigError as error:
                raise RequestError(400, f"the tools' arguments: {error}", param="tools") from None
        if request.schema is None:
            return None
        try:
            return JsonSchema(request.schema, tokenizer, vocab_size)
        except ConfigError as error:
            raise RequestError(400, str(error), param=request.fields["json_schema"]) from None

    def _remember(self, session: Session, made: Sequence[Step]) -> int:
        """Keeps the answer's own tokens; returns how many belong to its text."""
        text, tokens = "".join(step.text for step in made), [step.token for step in made]
        ids = answer_ids(self._prompts.tokenizer, tokens, text)
        session.rewind(len(session.tokens) - len(tokens) + len(ids))
        if ids:
            self._prompts.remember(text, ids)
        return len(ids)

    def _count(
        self, report: RunReport, n_prompt: int, n_cached: int, joules: float | None, watts: float | None
    ) -> Usage:
        metrics, n_decoded = self._metrics, len(report.decode_latencies_s)
        n_made = n_decoded + (report.time_to_first_token_s is not None)
        usage = Usage(n_prompt, n_cached if n_made else 0, n_made)
        metrics.prompt_tokens.inc(usage.prompt)
        metrics.cached_tokens.inc(usage.cached)
        metrics.generated_tokens.inc(usage.completion)
        metrics.prefill_seconds.inc(report.prefill_s or 0)
        metrics.decode_seconds.inc(sum(report.decode_latencies_s))
        metrics.latest("tokens_per_second", "Decoding speed of the latest answer", report.decode_tokens_per_s)
        kind = "estimated_" if self._energy.estimated else ""
        metrics.latest(f"{kind}watts", "Average power of the latest answer's decoding", watts)
        if joules is not None and n_decoded:
            millijoules = 1e3 * joules / n_decoded
            metrics.latest(f"{kind}millijoules_per_token", "Energy per token of the latest answer", millijoules)
        return usage


class _Output:
    """Steps to pieces: marks that decode to nothing, and log probabilities that wait for their text."""

    def __init__(self, job: Job, sampler: Sampler, prompts: RequestEncoder, timings: Timings) -> None:
        self._job, self._sampler, self._prompts, self._timings = job, sampler, prompts, timings
        self._n_made = self._n_told = 0

    def step(self, step: Step) -> None:
        self._n_made += 1
        timings = self._timings.token()
        text = step.text + (
            self._prompts.marks.get(step.token, "") if self._job.request.messages is not None else ""
        )
        if text:
            self._emit(text, self._n_made, timings)

    def end(self, n_kept: int) -> None:
        """n_kept: tokens that belong to the text, without what ended it."""
        if self._sampler.logprobs and n_kept > self._n_told:
            self._emit("", n_kept, None)

    def _emit(self, text: str, upto: int, timings: dict[str, object] | None) -> None:
        eos = self._prompts.tokenizer.eos_ids
        found = [each for each in self._sampler.logprobs[self._n_told : upto] if each.token not in eos]
        n_tokens, self._n_told = upto - self._n_told, upto
        told = timings if self._job.request.timings else None
        self._job.channel.emit(Piece(self._job.index, text, found, told, n_tokens))
