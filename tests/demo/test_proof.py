"""The demo succeeds only if every single claim holds."""

from dataclasses import replace
from typing import Any

import pytest

from weight_update.demo.proof import Evidence, Greedy, Requests, claims, report
from weight_update.demo.provenance import Verdict

from .builders import a_run, evidence, step

LIVE = a_run(pushed=True)
CONTROL = a_run(pushed=False)


def failed(made: Evidence) -> list[str]:
    return [claim.text for claim in claims(made) if not claim.proven]


def test_good_evidence_proves_everything() -> None:
    assert failed(evidence()) == []
    assert report(evidence(), 1.0)["proven"] is True


@pytest.mark.parametrize(
    ("changes", "claim"),
    [
        ({"before": Greedy(((1, 2),), ((1, 2),))}, "started from other weights"),
        ({"after": Greedy(((1, 2), (3, 4)), ((1, 2), (3, 9)))}, "greedy output equals"),
        ({"after": Greedy((), ())}, "greedy output equals"),
        ({"live": replace(LIVE, requests=Requests(600, 599, 1))}, "no request was lost"),
        ({"control": replace(CONTROL, requests=Requests(601, 600, 0))}, "no request was lost"),
        ({"live": replace(LIVE, last_version="9")}, "reached the engine"),
        ({"live": replace(LIVE, verdict=Verdict(600, ("spans",), 0.0))}, "carries the version"),
        ({"live": replace(LIVE, verdict=Verdict(599, (), 0.0))}, "carries the version"),
        ({"control": replace(CONTROL, verdict=Verdict(1, (), 0.0))}, "carries the version"),
        (
            {"control": replace(CONTROL, steps=(step(1, 0.6, pushed=False),))},
            "the reward rose",
        ),
        (
            {"live": replace(LIVE, steps=tuple(replace(s, carried=0) for s in LIVE.steps))},
            "carried across",
        ),
        (
            {"live": replace(LIVE, steps=(replace(LIVE.steps[0], update=None), *LIVE.steps[1:]))},
            "reached the engine",
        ),
    ],
)
def test_one_defect_fails_its_claim(changes: dict[str, Any], claim: str) -> None:
    made = evidence(**changes)
    assert any(claim in text for text in failed(made))
    assert report(made, 1.0)["proven"] is False


def test_the_report_has_what_was_measured() -> None:
    made = report(evidence(live=replace(LIVE, requests=Requests(600, 598, 2))), 12.34)
    assert made["reward_first"] == 0.1
    assert made["reward_last"] == 0.8  # the mean of the last five
    assert made["tokens_equal"] is True
    assert made["requests_lost"] == 2
    assert made["updates"] == 10
    assert made["engine"] == "reference 0.5.23"
    assert made["seconds"] == 12.3
