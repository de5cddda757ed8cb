"""A submission checked against the engines that serve its model, before it is queued."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tracewire.errors import TraceRejected, UnknownModulePath
from tracewire_bus.wire.codec import schema_version
from tracewire_bus.wire.messages import NO_MEDIA
from tracewire_bus.wire.packing import unpack

if TYPE_CHECKING:
    from tracewire_bus.domain.tree import ModuleTree
    from tracewire_bus.wire.messages import Block, EngineInfo, Submission

    from .served_models import ServedModel

__all__ = ["check_paths", "check_submission"]


def check_submission(submission: Submission, model: ServedModel) -> None:
    """Refuse a submission that some engine of the model could not run.

    Raises:
        TraceRejected: naming the field at fault.
        UnknownModulePath: a block names a module that the model does not have.
    """
    _check_interventions(submission, model)
    _check_edits(submission, model.engines)
    _check_plan(submission, model.engines)
    longest = max((engine.max_model_len for engine in model.engines), default=0)
    for invoke in submission.invokes:
        tokens = invoke.sampling.get("max_tokens")
        if longest and isinstance(tokens, int) and tokens > longest:
            why = f"expected at most {longest}, what a prompt and its output may have together, got {tokens}"
            raise TraceRejected("sampling.max_tokens", why)
        if invoke.lora is not None and invoke.lora not in model.info.loras:
            have = ", ".join(model.info.loras) or "none"
            raise TraceRejected("lora", f"model {submission.model!r} has no adapter {invoke.lora!r} (it has {have})")
        if invoke.media != NO_MEDIA and "image" not in model.info.modalities:
            raise TraceRejected("prompt.multi_modal_data", f"model {submission.model!r} takes no images")
    for block in (submission.block, *(invoke.block for invoke in submission.invokes)):
        if block is not None:
            check_paths(block, model.trees)


def _refuse_older(engines: Sequence[EngineInfo], since: tuple[int, int], field: str, what: str) -> None:
    """Refuse a field where an engine's schema is older than `since`: the engine would run the trace without it."""
    for engine in engines:
        version = schema_version(engine.schema)
        if version is not None and version < since:
            why = f"engine {engine.engine} is of a version that knows {what}, and would run the trace without"
            raise TraceRejected(field, why)


def _check_edits(submission: Submission, engines: Sequence[EngineInfo]) -> None:
    if submission.edits is not None or any(invoke.edits is not None for invoke in submission.invokes):
        _refuse_older(engines, (1, 1), "edits", "no edits")


def _check_plan(submission: Submission, engines: Sequence[EngineInfo]) -> None:
    if submission.schedule or any(invoke.forced_tokens for invoke in submission.invokes):
        _refuse_older(engines, (2, 5), "schedule" if submission.schedule else "forced_tokens", "none")


def _check_conditions_known(submission: Submission, engines: Sequence[EngineInfo]) -> None:
    index = next((place for place, one in enumerate(submission.interventions) if one.when is not None), None)
    if index is not None:
        _refuse_older(engines, (2, 4), f"interventions[{index}].when", "no conditions")


def _check_interventions(submission: Submission, model: ServedModel) -> None:
    if not submission.interventions:
        return
    from tracewire_bus.domain.intervention_checks import DeclarationError, KnownModel, check_encoded
    from tracewire_bus.domain.patch_checks import patched_prompts

    _check_conditions_known(submission, model.engines)
    known = KnownModel(tuple(name for name in (model.info.name, model.info.path) if name))
    try:
        patched_prompts(submission.interventions, len(submission.invokes))
        check_encoded(
            *(submission.interventions, submission.live, model.trees), hidden_size=model.info.hidden_size, model=known
        )
    except DeclarationError as error:
        raise TraceRejected(error.field, error.message) from None


def check_paths(block: Block, trees: Sequence[ModuleTree]) -> None:
    """Refuse a block with a literal module path that the model does not have.

    Raises:
        UnknownModulePath: for the first such path.
        TraceRejected: a path that the model's engines do not serve.
    """
    from tracewire_bus.domain.tree import check_block, index_names

    names = [block.parameters[0], *(name for name, path in block.paths.items() if not path)]
    # Any engine of the model may run it.
    indices: tuple[tuple[str, int], ...] = ()
    if layers := index_names(block.source):
        values = unpack(block.variables)
        indices = tuple((name, values[name]) for name in sorted(layers) if type(values.get(name)) is int)
    problems = (
        problem for tree in trees for name in names for problem in check_block(tree, block.source, name, indices)
    )
    for problem in problems:
        filename, line = block.filename, block.first_line + problem.line - 1
        source = block.source.splitlines()[problem.line - 1].strip()
        if problem.reason:
            raise TraceRejected(
                "block", problem.reason, type="UntappedLocation", filename=filename, line=line, source=source
            )
        raise UnknownModulePath(problem.path, problem.nearest, filename=filename, line=line, source=source)
    for path in block.paths.values():
        tree = next((tree for tree in trees if not tree.knows(path)), None)
        if tree is not None:
            raise UnknownModulePath(path, tree.nearest(path))
