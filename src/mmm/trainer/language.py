"""Around the loop of a language model: the weights that it starts from (``--init_from``), and samples of its text
(``--prompt``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from mmm.generate import config_of, encode_prompt, load_weights, sample_text
from mmm.nn.sampling import Sampling
from mmm.parallel.parallel_model import ParallelModel
from mmm.run.run import Run
from mmm.trainer.job import Job
from mmm.weights.weights import Weights

SAMPLE_TOKENS = 100


def check_prompt(prompt: str | None, job: Job, bos: Sequence[int]) -> None:
    """Raises ConfigError, DataError: a prompt that does not fit."""
    if prompt is not None:
        data = job.data
        encode_prompt(prompt, data.tokenizer, data.train.seq_length, job.sizes.vocab_size, bos)


def log_sample(
    run: Run,
    model: ParallelModel,
    job: Job,
    prompt: str | None,
    bos: Sequence[int],
    stop: Sequence[int],
) -> None:
    """Have the model go on with ``--prompt``; log it, and keep it in the record. A collective."""
    if prompt is None:
        return
    data, vocabulary = job.data, job.sizes.vocab_size
    block = data.train.seq_length
    tokens = encode_prompt(prompt, data.tokenizer, block, vocabulary, bos)
    sampling = Sampling(seed=run.seed)
    with run.evaluating(model):
        text, _ = sample_text(model, tokens, data.tokenizer, SAMPLE_TOKENS, sampling, block, vocabulary, stop, bos)
    run.log.info("sample after step %d:\n%s", run.clock.step, text, stacklevel=2)
    earlier = run.facts.get("samples", [])
    run.describe(samples=[*earlier, {"iter": run.clock.step, "text": text}])


def start_from(run: Run, model: ParallelModel, weights: Weights | None) -> None:
    """Load the weights that a run starts from, unless it goes on from a checkpoint. A collective."""
    if weights is None or run.origin is not None:
        return
    load_weights(run.rank, model, weights)
    for text in (f"weights of {weights.path}", *weights.metadata.notes):
        run.note(text)
    run.describe(init_from={"path": weights.path, "sizes": asdict(config_of(weights))})
