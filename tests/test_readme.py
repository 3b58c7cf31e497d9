"""The programs in the README run as they stand, one after the other in one session."""

import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_code_of_the_readme_runs_and_learns(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 6
    session: dict = {}
    for block in blocks:
        exec(compile(block, "<README>", "exec"), session)
    session["test_swish"]()
    losses = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines() if re.match(r"\d+ \d", line)]
    assert len(losses) == 20
    assert losses[-1] < 0.7 * losses[0]
