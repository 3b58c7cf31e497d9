"""The campaign: its judge recognises every outcome, and a few cases of each area end well."""

import json
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parents[1] / "campaign" / "__main__.py"


@pytest.fixture(scope="module")
def campaign(forks, tmp_path_factory):
    """campaign("archives", "--cases", 3) gives the exit status, the output, and the results of the cases."""

    def campaign(*args):
        results = tmp_path_factory.mktemp("campaign") / "results"
        status, out, err = forks(CAMPAIGN, [*args, "--json", results], results.parent, {})
        assert "Traceback" not in err, err
        return status, out, [json.loads(line) for line in results.read_text().splitlines()]

    return campaign


def test_the_judge_finds_every_outcome(campaign):
    status, out, results = campaign("planted", "--cases", 20)
    assert status == 1
    assert len(results) == 20
    assert len({found["outcome"] for found in results}) == 9
    for found in results:
        assert found["outcome"] == found["what"], found
    repeat = next(found for found in results if found["what"] == "wrong")["number"]
    assert f"4 × wrong: wrong\n    4, not 5 \n    python tests/campaign --repeat {repeat} --seed 0 planted" in out


def test_a_few_cases_of_every_area_are_good(campaign):
    status, out, _ = campaign("--quick", "--cases", 5, "--seed", 1)
    assert status == 0, out
