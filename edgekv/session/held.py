"""What a session holds until it is closed, and what takes its place: nothing, a saved conversation, another's."""

from __future__ import annotations

import inspect
import weakref

from edgekv.errors import SessionError
from edgekv.kvcache import CacheSpec
from edgekv.machine import format_bytes
from edgekv.session.context_shift import ContextShift
from edgekv.session.drafts import Drafts
from edgekv.session.generation import StepIterator
from edgekv.session.model_runner import ModelRunner
from edgekv.session.opening import LoadedModel, fork
from edgekv.session.report import RunReport
from edgekv.session.saving import SavedState


class Held:
    """An empty conversation at first. loaded: what it is computed on; report: of the latest text."""

    def __init__(self, loaded: LoadedModel, context_shift: ContextShift, drafts: Drafts | None) -> None:
        self.loaded, self.report = loaded, loaded.new_report()
        self._runner: ModelRunner | None = loaded.new_runner(context_shift, drafts)
        self._steps: weakref.ref[StepIterator] | None = None  # its caller may exhaust, close or drop it

    @property
    def runner(self) -> ModelRunner:
        """Raises SessionError when it is closed."""
        if self._runner is None:
            raise SessionError(f"this session of {self.loaded.model.name} is closed: load another, or restore one")
        return self._runner

    @property
    def nbytes(self) -> int:
        """Bytes of the caches, with those of a draft model."""
        drafts = self.runner.drafts
        return self.runner.state.nbytes + (drafts.nbytes if drafts else 0)

    @property
    def idle_runner(self) -> ModelRunner:
        """The same, to change what it holds. Raises SessionError while a text is being generated."""
        if self._running() is not None:
            raise SessionError("this session is generating a text: exhaust or close its iterator first")
        self.runner.require_free()
        return self.runner

    def generating(self, steps: StepIterator, report: RunReport) -> StepIterator:
        """The text that is generated from now on; returns its steps.

        Raises SessionError where another thread has begun one meanwhile.
        """
        _ = self.idle_runner
        self._steps, self.report = weakref.ref(steps), report
        return steps

    def reset(self, lora: str | None) -> None:
        """Forgets the conversation, and goes on with a LoRA. Raises ConfigError for one that was not loaded."""
        state, loaded = self.idle_runner.state, self.loaded.with_lora(lora)
        state.clear()
        self._run_on(loaded)

    def restore(self, saved: SavedState) -> None:
        """Replaces the conversation by a saved one. Raises as `Session.load_state`."""
        runner, mine = self.idle_runner, self.loaded
        loaded = mine.with_lora(saved.require_plan(mine.model, mine.plan))
        state = loaded.new_state()
        saved.fill(state, mine.model.config)
        runner.state = state
        self._run_on(loaded)

    def copy_from(self, other: Held) -> None:
        """Replaces the conversation by another's. Raises SessionError for another plan."""
        state = self.idle_runner.state
        mine, theirs = ((on.model.path, on.lora, on.plan.kv, on.plan.ctx) for on in (self.loaded, other.loaded))
        if mine != theirs:
            raise SessionError(f"{other} can't be taken over by {self}: model, LoRA, kv and ctx must be the same")
        state.copy_from(other.runner.state, self.loaded.new_state().caches)

    def _run_on(self, loaded: LoadedModel) -> None:
        self.loaded, self.runner.decoder = loaded, loaded.decoder
        self.report = loaded.new_report()

    def fork(self, kv: str | CacheSpec | None, ctx: int | None) -> Held:
        """For another, empty conversation. Raises as `Session.fork`."""
        runner, loaded = self.runner, fork(self.loaded, kv, ctx)
        return Held(loaded, runner.context_shift, runner.drafts and runner.drafts.fork())

    def close(self) -> None:
        """Ends the text and frees the caches."""
        steps = self._running()
        if steps is not None:
            steps.close()
        if self._runner is not None:
            self._runner.state.caches = []
            self._runner = None

    def __repr__(self) -> str:
        loaded, runner = self.loaded, self._runner
        about = f"{loaded.model.name}, kv {loaded.plan.kv.short}"
        if runner is None:
            return f"<edgekv.Session {about}, closed>"
        held = f"{len(runner.tokens)} of {runner.ctx} tokens, cache {format_bytes(self.nbytes)}"
        return f"<edgekv.Session {about}, {held}>"

    def _running(self) -> StepIterator | None:
        """The latest text's steps, while another can be asked for."""
        steps = self._steps and self._steps()
        return steps if steps and inspect.getgeneratorstate(steps) != inspect.GEN_CLOSED else None
