"""Train the classifier of texts on images and on a graph, whose structure is the attention pattern.

Images: a handwritten digit of 8 × 8 pixels is read as its 25 patches of 4 × 4 pixels, which overlap, and each patch
attends to all. Training also uses 20 copies of each image, turned, stretched, slanted and moved a little at random.
Graph: the 34 members of a karate club (Zachary 1977) attend only to themselves and their friends. Two members, the
instructor and the officer, are labelled; the model predicts which club each of the others joined when the club split.
Ten models are trained, and for comparison ten without the graph, where all attend to all. --steps also limits the steps
on the graph. The data comes with scikit-learn and networkx: pip install 'scratchformer[units]'.
"""

from types import SimpleNamespace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from scratchformer import Key, ops
from scratchformer.backend import to_cpu, to_device
from scratchformer.data import DrawnBatches, Images, LabelledBatch, load_digits
from scratchformer.data.digits import CLASSES, GREYS, SIDE
from scratchformer.models import Classifier
from scratchformer.optim import Adam, AdamW, Cosine
from scratchformer.training import start

PATCH = 4  # pixels on a side
PATCHES = (SIDE - PATCH + 1) ** 2
COPIES = 20  # of each training image, all changed
TURN, STRETCH, SLANT, MOVE = np.deg2rad(12), 0.1, 0.15, 1.0  # the largest changes
PRESETS = {
    "small": dict(
        d_model=64, heads=4, depth=2, dropout=0.1, batch_size=64, lr=2e-3, weight_decay=0.1, warmup=50, steps=1200,
        graph=dict(d_model=64, heads=2, depth=4, dropout=0.5, lr=1e-3, steps=200, seeds=10),
    ),
}  # fmt: skip
OPTIONS = {"data": None, "estimate": None}


def data(run):
    digits = load_digits()
    copies = with_changed_copies(digits.train, run.key("batches").fold("copies").generator())
    return SimpleNamespace(**digits._asdict(), copies=copies, fingerprint=digits.fingerprint)


def model(run, digits):
    sizes = run.sizes("d_model", "heads", "depth", "dropout") | dict(max_length=PATCHES, units=PATCH * PATCH)
    return Classifier(None, CLASSES, norm="pre", activation="gelu", embedding_std=0.5, key=run.key("weights"), **sizes)


def score(run, replicas, digits, part):
    batch = replicas.move(as_patches(getattr(digits, part)))
    loss, _ = replicas.model.loss(*batch)
    right = replicas.model(batch.ids).argmax(axis=-1) == batch.labels
    return {"loss": float(loss), "accuracy": float(right.mean())}


def as_patches(images: Images) -> LabelledBatch:
    """Units (n, PATCHES, PATCH²): the grey values of each patch, from 0 to 1; patches row by row."""
    n = len(images.labels)
    patches = sliding_window_view(images.pixels, (PATCH, PATCH), axis=(1, 2))  # (n, down, across, y, x)
    units = patches.reshape(n, PATCHES, PATCH * PATCH).astype(np.float32) / (GREYS - 1)
    return LabelledBatch(units, np.full(n, PATCHES), images.labels)


def with_changed_copies(images: Images, draw: np.random.Generator) -> Images:
    """The images, and COPIES of each: turned, stretched along both axes, slanted and moved, each by a random amount.

    The bounds are TURN (radians), STRETCH (of the logarithm of a factor), SLANT (pixels per pixel) and MOVE (pixels).
    """
    from scipy import ndimage

    originals, center = np.tile(images.pixels, (COPIES, 1, 1)), (SIDE - 1) / 2
    changed = np.empty_like(originals)
    for i, image in enumerate(originals):
        angle, slant = draw.uniform(-TURN, TURN), draw.uniform(-SLANT, SLANT)
        rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        # from a pixel (y, x) of the copy to its place in the image; outside of the image all is white
        matrix = rotation @ [[1, 0], [slant, 1]] @ np.diag(np.exp(draw.uniform(-STRETCH, STRETCH, 2)))
        offset = center - matrix @ [center, center] + draw.uniform(-MOVE, MOVE, 2)
        changed[i] = np.rint(ndimage.affine_transform(image, matrix, offset, output=float, order=1))
    return Images(np.concatenate([images.pixels, changed]), np.tile(images.labels, COPIES + 1))


def load_club() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The adjacency matrix (n, n), with self-loops; the two labelled members (2,); the club of each member (n,)."""
    try:
        import networkx
    except ImportError as error:
        raise ImportError("the karate club comes with networkx: pip install 'scratchformer[units]'") from error
    graph = networkx.karate_club_graph()
    edges = networkx.to_numpy_array(graph) > 0
    clubs = np.array([int(graph.nodes[member]["club"] == "Officer") for member in graph])
    return edges | np.eye(len(clubs), dtype=bool), np.array([0, len(clubs) - 1]), clubs


def predict_clubs(run, pattern: ops.Pattern | None, known: np.ndarray, clubs: np.ndarray, key: Key) -> np.ndarray:
    """Train on the members in `known`; return the probability of each club for every member, (n, 2)."""
    n, size = len(clubs), dict(run.graph)
    lr, steps, _ = (size.pop(name) for name in ("lr", "steps", "seeds"))
    units = to_device(np.eye(n, dtype=np.float32)[None], run.device)  # one-hot: a member has no features
    labels = to_device(np.where(np.isin(np.arange(n), known), clubs, ops.IGNORED)[None], run.device)
    size |= dict(max_length=n, units=n, pool="none", positions="none", norm="pre")
    model = Classifier(None, 2, key=key.fold("weights"), **size).to(run.device)
    adam = Adam(model.parameters(), lr)
    for step in range(min(steps, run.total)):
        _, cache = model.loss(units, None, labels, key.fold("train", step), pattern)
        model.zero_grad()
        model.loss_backward(1.0, cache)
        adam.step()
    return to_cpu(ops.softmax(model(units, pattern=pattern)[0])[0])


def accuracy(p: np.ndarray, known: np.ndarray, clubs: np.ndarray) -> float:
    """The share of the members not in `known` for whom p (n, 2) is highest at their club."""
    return float(np.delete(p.argmax(axis=-1) == clubs, known).mean())


def train_on_graph(run) -> None:
    edges, known, clubs = load_club()
    keys = [Key(run.seed).fold("graph", i) for i in range(run.graph["seeds"])]
    print(f"graph: {len(clubs)} members, {(edges.sum() - len(clubs)) // 2} friendships, {len(known)} labelled")
    for name, pattern in (("along the edges", ops.Edges(to_device(edges, run.device))), ("all to all", None)):
        predictions = [predict_clubs(run, pattern, known, clubs, key) for key in keys]
        each = [accuracy(p, known, clubs) for p in predictions]
        together = accuracy(np.mean(predictions, axis=0), known, clubs)
        right = f"{np.mean(each):.1%} of the other {len(clubs) - 2} right; mean of {len(keys)} models"
        print(f"graph: {name}, {right}, lowest {min(each):.1%}, all together {together:.1%}")


def main(run):
    digits = run.load(data)
    print(f"images: {len(digits.train.labels):,} for training, {COPIES} copies of each, of {PATCHES} units")
    batches = DrawnBatches(as_patches(digits.copies), run.batch_size, run.key("batches"))
    with run.replicas(model(run, digits), batches) as replicas:
        adam = AdamW(replicas.model.parameters(), run.lr, weight_decay=run.weight_decay)
        rate = Cosine(run.lr, min(run.warmup, run.total // 5), run.total)
        for step in run.steps(replicas, adam, batches):
            loss = replicas.gradients(batches.batch(step), run.key("train", step))  # forward and backward
            norm = replicas.clip(adam, 1.0)
            adam.lr = rate(step)
            replicas.step(adam)
            run.log(loss=loss, norm=norm)
            if run.due(max(25, run.total // 20)):
                run.keep_best(score(run, replicas, digits, "validation"))
        run.load_best()
        right = score(run, replicas, digits, "test")["accuracy"]
    print(f"images: {right:.2%} of {len(digits.test.labels)} test images right")
    train_on_graph(run)


if __name__ == "__main__":
    start(main)
