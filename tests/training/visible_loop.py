"""The loop of a program, as a function."""

from functools import partial

from scratchformer.training import Run


def train(
    replicas,
    optimizer,
    schedule,
    batches,
    steps,
    out,
    evaluate=None,
    evaluate_every=0,
    clip=1.0,
    seed=0,
    identity=None,
    resume=False,
    tensorboard=False,
    shard=False,
    loss_scale=None,
    **options,
):
    """Train `replicas.model`: a step computes the gradients of `batches.batch(step)`, clips their norm to `clip`, sets
    the learning rate to `schedule(step)` and steps the optimizer. `evaluate()` is called every `evaluate_every` steps
    and at the end. options: those of `Run.steps`. Returns the state at the end.
    """
    settings = dict(tensorboard=tensorboard, shard=shard, precision=replicas.precision)
    run = Run(out, steps, seed, resume, replicas.device, replicas.ranks, identity, **settings)
    replicas.loss_scale = loss_scale or replicas.loss_scale
    remembered = getattr(batches, "remember", None)
    for step in run.steps(replicas, optimizer, batches, **options):
        remember = remembered and partial(remembered, step)
        loss = replicas.gradients(batches.batch(step), run.key("train", step), remember)
        norm = replicas.clip(optimizer, clip)
        optimizer.lr = schedule(step)
        replicas.step(optimizer)
        run.log(loss=loss, norm=norm)
        if evaluate is not None and run.due(evaluate_every):
            run.keep_best(evaluate())
    return run._values
