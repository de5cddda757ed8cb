"""The submission by which a recorded trace runs again: the same prompts, seeds and changes at the same tokens."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tracewire.errors import InvalidRecording
from tracewire.planned import check_planned
from tracewire_bus.domain.intervention_checks import normalize
from tracewire_bus.wire.live_values import live_values, pack_live
from tracewire_bus.wire.messages import Invoke, ScheduledChange, Submission
from tracewire_bus.wire.packing import pack, wire

if TYPE_CHECKING:
    from tracewire.traces.output import Accepted

    from .recording import Recording

__all__ = ["CUT", "Place", "planned_again", "planned_fork"]

#: Ends after which a trace has fewer tokens than it would have had by itself.
CUT = ("cancelled", "expired", "failed", None)


class Place(NamedTuple):
    """A token of a choice of a trace."""

    at: int
    invoke: int = 0
    choice: int = 0


def planned_again(recording: Recording, client: str, model: str | None = None) -> Submission:
    """The submission of the whole trace again.

    Raises:
        InvalidRecording: the recording lacks what that takes.
    """
    submission, accepted = _parts(recording)
    state = recording.state()
    invokes = []
    for index, invoke in enumerate(submission.invokes):
        sampling = _sampling(invoke, accepted, index)
        if state.status in CUT:
            tokens = [len(one.token_ids) for one in state.invokes[index].choices] if index < len(state.invokes) else []
            sampling["max_tokens"] = max(1, *tokens, 0)
            if "min_tokens" in sampling:
                sampling["min_tokens"] = min(sampling["min_tokens"], sampling["max_tokens"])
        invokes.append(msgspec.structs.replace(_same_prompt(invoke, accepted, index), sampling=sampling))
    return msgspec.structs.replace(
        _again(submission, accepted, client, model),
        invokes=invokes,
        schedule=[
            _change(one.index, one.values, by=one.by, invoke=one.invoke, choice=one.choice)
            for one in recording.steering()
        ],
    )


def planned_fork(
    recording: Recording, client: str, place: Place, live: dict[str, Any], logprobs: int | None = None
) -> Submission:
    """The submission of a sibling of one choice: the same before a token, and with other live values from it on.

    Raises:
        InvalidRecording: the recording lacks what that takes.
        ValueError: the trace has no such choice, or no such token yet.
        TraceRejected: a live parameter was not declared, or has another form.
    """
    submission, accepted = _parts(recording)
    state, (at, invoke, choice) = recording.state(), place
    if not 0 <= invoke < len(submission.invokes):
        raise ValueError(f"invoke: expected one of {len(submission.invokes)} prompts, got {invoke}")
    choices = state.invokes[invoke].choices if invoke < len(state.invokes) else []
    if not 0 <= choice < max(1, len(choices)):
        raise ValueError(f"choice: expected one of {max(1, len(choices))} choices, got {choice}")
    tokens = choices[choice].token_ids if choices else []
    if not 0 <= at <= len(tokens):
        raise ValueError(f"at: expected the index of a token from 0 to {len(tokens)}, as far as the trace is, got {at}")
    own = submission.invokes[invoke]
    sampling = _sampling(own, accepted, invoke)
    if isinstance(sampling.get("seed"), int) and (sampling.get("n") or 1) > 1:
        # As vLLM seeds its choices.
        sampling["seed"] += choice
    sampling["n"] = 1
    if logprobs is not None:
        sampling["logprobs"] = logprobs
    steering = [one for one in recording.steering() if (one.invoke, one.choice) == (invoke, choice) and one.index < at]
    made = msgspec.structs.replace(
        _again(submission, accepted, client, None),
        invokes=[
            msgspec.structs.replace(
                _same_prompt(own, accepted, invoke), sampling=sampling, forced_tokens=list(tokens[:at])
            )
        ],
        schedule=[
            *(_change(one.index, one.values, by=one.by) for one in steering),
            *([_change(at, live, by=client)] if live else []),
        ],
    )
    check_planned(made)
    return made


def _parts(recording: Recording) -> tuple[Submission, Accepted]:
    submission, accepted = recording.submission, recording.accepted
    if submission is None:
        raise InvalidRecording(
            "",
            f"the recording of {recording.trace_id} lacks the submission, and cannot run again: Redis keeps one until "
            "the trace ends. Record the trace while it runs, or by the handle that submitted it (trace.record())",
        )
    if recording.lacks_steering():
        raise InvalidRecording(
            "",
            f"trace {recording.trace_id} was steered in events that its engine had trimmed before they were recorded, "
            "so it cannot run again as it did (tracewire engine --retain-events and --retain-bytes)",
        )
    if accepted is None:
        raise InvalidRecording("", f"no engine had accepted trace {recording.trace_id} when it was recorded")
    return submission, accepted


def _again(submission: Submission, accepted: Accepted, client: str, model: str | None) -> Submission:
    edits = None if submission.edits is None and not accepted.edits else _edits(accepted)
    return msgspec.structs.replace(
        submission,
        trace=uuid.uuid4().hex,
        model=model or submission.model,
        client=client,
        live=_packed(accepted.live),
        detach=False,
        lease="",
        deadline_s=None,
        context={},
        edits=edits,
        # Decoding has made NumPy arrays of its arrays.
        interventions=normalize(submission.interventions),
    )


def _edits(accepted: Accepted) -> list[str]:
    return list(dict.fromkeys(name for edits in accepted.edits for name, _ in edits))


def _same_prompt(invoke: Invoke, accepted: Accepted, index: int) -> Invoke:
    """The prompt by the ids of its tokens, whatever the tokenizer does; a chat and one with media as they were."""
    ids = accepted.prompt_token_ids[index] if index < len(accepted.prompt_token_ids) else None
    if invoke.chat is not None or invoke.media != Invoke().media or not ids:
        return invoke
    return msgspec.structs.replace(invoke, prompt=None, messages=None, token_ids=list(ids))


def _sampling(invoke: Invoke, accepted: Accepted, index: int) -> dict[str, Any]:
    """The sampling params as they were sent, with the seed that the engine used."""
    used = accepted.sampling[index] if index < len(accepted.sampling) else {}
    seed = used.get("seed")
    return {**invoke.sampling, **({} if seed is None else {"seed": seed})}


def _change(index: int, values: dict[str, Any], **more: Any) -> ScheduledChange:
    return ScheduledChange(index=index, values=_packed(values), **more)


def _packed(values: dict[str, Any]) -> bytes:
    return pack_live({name: value.packed for name, value in live_values(values).items()}) if values else pack(wire({}))
