"""Ten training steps with an installed scratchformer, in an empty folder: `python ten_steps.py FOLDER`."""

import sys
from pathlib import Path

import scratchformer as sf

CHECKOUT, OUT = Path(__file__).resolve().parent.parent, Path(sys.argv[1])
INSTALLED = Path(sf.__file__).parent
if INSTALLED.is_relative_to(CHECKOUT):
    sys.exit(f"this is the checkout, not an installed package: {INSTALLED}")


def files(package: Path) -> set[str]:
    return {p.relative_to(package).as_posix() for p in package.rglob("*") if p.suffix in (".py", ".typed")}


if missing := files(CHECKOUT / "scratchformer") - files(INSTALLED):
    sys.exit(f"not in the package: {', '.join(sorted(missing))}")

corpus = sf.data.load_standard_library()
model = sf.models.LanguageModel(vocab_size=256, d_model=64, heads=4, depth=2, context=64)
batches = sf.data.TextBatches(corpus.train, 16, 64, sf.Key(0))
adam = sf.optim.Adam(model.parameters(), lr=3e-3)


def evaluate() -> dict[str, float]:
    return sf.training.evaluate_language_model(replicas, corpus.validation[:4096])


run = sf.training.Run(OUT, steps=10)
with run.replicas(model, batches) as replicas:
    before = evaluate()["loss"]
    for step in run.steps(replicas, adam, batches):
        loss = replicas.gradients(batches.batch(step), run.key("train", step))
        norm = replicas.clip(adam, 1.0)
        replicas.step(adam)
        run.log(loss=loss, norm=norm)
    after = evaluate()["loss"]
print(f"scratchformer {sf.__version__}: loss {before:.3f} before, {after:.3f} after ten steps")
if not after < before - 1:
    sys.exit("it has learned nothing")
