"""What happens around the step of a language model: the weights that it starts from (``--init_from``), the balance of
its experts, samples of its text (``--prompt``), and what its checkpoints keep for `mmm sample`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from mmm.checkpoint.model_metadata import ModelMetadata
from mmm.generate import config_of, encode_prompt, load_weights, sample_text
from mmm.nn.sampling import Sampling
from mmm.optim.grad_scaler import GradScaler
from mmm.parallel.generate import check_generation
from mmm.parallel.parallel_model import ParallelModel
from mmm.run.run import Run
from mmm.run.step import Step
from mmm.trainer.job import Job
from mmm.trainer.sizes import has_tokenizer
from mmm.weights.weights import Weights

# Tokens that are written after a prompt.
SAMPLE_TOKENS = 100


def metadata_of(job: Job) -> ModelMetadata:
    """What a checkpoint keeps for `mmm sample` and `mmm export`: the tokenizer, the longest sequence, and what the
    weights that the run starts from say of themselves."""
    tokenizer = job.data.tokenizer
    start = ModelMetadata()
    if job.weights is not None:
        start = job.weights.metadata
        # An adapter belongs to a base; other weights have changed.
        base = None if job.lora is None else job.weights.base
        start = replace(start, base=base, notes=())
    if not has_tokenizer(job.weights, tokenizer):
        # What the files say of tokens means others now.
        start = replace(start, descriptions={})
    if tokenizer is None:
        start = replace(start, tokenizer=None, chat=None)
    else:
        start = replace(start, tokenizer=(tokenizer.file, tokenizer.content), chat=tokenizer.chat)
    # Rotary positions know longer sequences than those of a fine-tuning.
    block = max(job.data.train.seq_length, start.block or 0)
    return replace(start, block=block, bos=job.bos, eos=job.eos)


def start_from(run: Run, model: ParallelModel, weights: Weights | None) -> None:
    """Load the weights that a run starts from. A run that resumes from a checkpoint has its own. A collective."""
    if weights is None or run.origin is not None:
        return
    load_weights(run.rank, model, weights)
    run.note(f"weights of {weights.path}")
    for text in weights.metadata.notes:
        run.note(text)
    run.describe(init_from={"path": weights.path, "sizes": asdict(config_of(weights))})


def balance_experts(model: ParallelModel, step: Step, scaler: GradScaler, rate: float) -> None:
    """Raise the bias of experts with too few tokens, and lower it for those with too many. A collective.

    Nothing changes after a skipped step: fp16's scaler skips a step that overflows, `step.skip` any that is not finite.
    """
    skipped = scaler.found_inf if step.skip is None else step.skip
    # The factor is computed on the device, so that the host does not wait for it.
    step_rate = rate if skipped is None else rate * (1 - skipped)
    imbalance = model.balance_experts(step_rate, step.due)
    if imbalance is not None:
        step.row["imbalance"] = imbalance


def check_prompt(prompt: str | None, job: Job, bos: Sequence[int]) -> None:
    """Raises ConfigError or DataError for a prompt that does not fit."""
    # Here too it is refused before the ranks meet, and not at the first evaluation.
    if prompt is not None:
        check_generation(job.techniques)
        data = job.data
        encode_prompt(prompt, data.tokenizer, data.train.seq_length, job.sizes.vocab_size, bos)


def log_sample(run: Run, model: ParallelModel, job: Job, prompt: str | None) -> None:
    """Have the model continue the text of ``--prompt``; log it, and keep it in the record. A collective."""
    if prompt is None:
        return
    tokenizer = job.data.tokenizer
    vocab_size = job.sizes.vocab_size
    # The most tokens that the model sees at once.
    block = job.data.train.seq_length
    tokens = encode_prompt(prompt, tokenizer, block, vocab_size, job.bos)
    # Every sample of a run draws the same random numbers, so only the model differs.
    sampling = Sampling(seed=run.seed)
    with run.evaluating(model):
        text, _ = sample_text(
            model,
            tokens,
            tokenizer,
            SAMPLE_TOKENS,
            sampling,
            block,
            vocab_size,
            job.eos,
            job.bos,
        )
    run.log.info("sample after step %d:\n%s", run.clock.step, text, stacklevel=2)
    earlier = run.facts.get("samples", [])
    run.describe(samples=[*earlier, {"iter": run.clock.step, "text": text}])
