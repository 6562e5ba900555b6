"""What a run tells while it goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from flaxen.core.errors import ConfigError
from flaxen.train.settings.field import setting

MEASURED = "measured"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeeingSettings:
    """`eval_every` 0 evaluates before and after. `report_to` names sinks of
    `train.run.sinks.SINKS`; log.jsonl and log.csv are always written. `sample_prompts` is a list of
    prompts, or one file of them.
    """

    eval_every: int = setting(
        0, "Steps between evaluations; 0: before and after.", least=0, free=True
    )
    eval_at_start: bool = setting(True, "Evaluate before the first step too.", free=True)
    eval_batches: int = setting(
        0, "Batches in an evaluation; 0: all there are.", least=0, free=True
    )
    sample_prompts: str | Sequence[str] | None = setting(
        None,
        "Prompts that are answered at each evaluation, or a .txt or .jsonl file of them.",
        free=True,
        flag=list[str],
    )
    sample_tokens: int = setting(64, "Tokens of such an answer, at most.", least=1, free=True)
    sample_raw: bool = setting(
        False, "Continue those prompts as they are, without the chat template.", free=True
    )
    report_to: str | Sequence[str] | None = setting(
        None, "Who is told besides: tensorboard, wandb, trackio.", free=True, flag=list[str]
    )
    project: str = setting("flaxen", "Under which wandb and trackio list the run.", free=True)
    run_name: str | None = setting(
        None, "What they call it; default: the name of the output folder.", free=True
    )
    peak_flops: float | str | None = setting(
        None,
        "Operations a second of one device, for MFU, or measured; default: that of known chips.",
        free=True,
    )
    log_every: int = setting(
        0,
        "Steps between lines where there is no terminal; 0: every 10 seconds.",
        least=0,
        free=True,
    )
    progress: bool = setting(True, "A bar on the terminal.", free=True, flag=False)

    def peak(self) -> float | str | None:
        """What `peak_flops` asks for.

        Raises:
            ConfigError: it is no number above 0, and not `measured`.
        """
        try:
            if self.peak_flops in (None, MEASURED):
                return self.peak_flops
            number = float(self.peak_flops or 0)
        except ValueError:
            number = 0.0
        if not number > 0:
            raise ConfigError(
                f"peak_flops is {self.peak_flops!r}, expected operations a second, such as "
                f"989e12, or {MEASURED!r}."
            )
        return number

    def sinks(self) -> list[str]:
        """Those that `report_to` names, each once."""
        named = [self.report_to] if isinstance(self.report_to, str) else self.report_to or ()
        return list(dict.fromkeys(named))
