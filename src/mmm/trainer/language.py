"""What happens around the step of a language model: the weights that it starts from (``--init_from``), the balance of
its experts, samples of its text (``--prompt``), and what its checkpoints keep for `mmm sample`."""

from __future__ import annotations

from dataclasses import asdict, replace

from mmm.checkpoint.model_metadata import ModelMetadata
from mmm.data.text.chat_tokens import ChatTokens
from mmm.data.text.text_data import TextData
from mmm.generate import encode_prompt, end_of_answers, load_weights, sample_text
from mmm.nn.lora import LoRA
from mmm.nn.sampling import Sampling
from mmm.optim.grad_scaler import GradScaler
from mmm.parallel.parallel_model import ParallelModel
from mmm.run.run import Run
from mmm.run.step import Step
from mmm.trainer.job import Job
from mmm.weights.weights import Weights, config_of

# Tokens that are written after a prompt.
SAMPLE_TOKENS = 100


def metadata_of(weights: Weights | None, lora: LoRA | None, data: TextData) -> ModelMetadata:
    """What is known about the model of a run besides its sizes. Checkpoints keep it for `mmm sample` and `mmm export`.

    It is what the weights say that the run starts from, with the tokenizer of the text and what training changes. If
    the text has another tokenizer than theirs, no token begins a text, and what ends an answer ends it.

    Args:
        weights: weights that the model starts from. None if they are drawn.
        lora: the small matrices that are trained in place of the model's own; None if there are none.
        data: the text.
    """
    metadata = ModelMetadata()
    if weights is not None:
        # An adapter belongs to a base. Merged or trained weights are in no folder of others.
        base = None if lora is None or weights.lora else weights.metadata.base
        metadata = replace(weights.metadata, base=base, notes=())
    tokenizer = data.tokenizer
    if tokenizer is not None:
        own = (tokenizer.file, tokenizer.content)
        chat = tokenizer.chat
        if metadata.tokenizer not in (None, own):
            # The same numbers mean other texts now.
            metadata = replace(metadata, bos=(), eos=(), descriptions={})
        elif metadata.chat is not None and (chat is None or not chat.template):
            # Tokens on disk have the tokenizer's file, and nothing of its chats.
            chat = metadata.chat
        metadata = replace(metadata, tokenizer=own, chat=chat)
    of_answers = end_of_answers(tokenizer)
    eos = metadata.eos or of_answers
    if isinstance(data.train, ChatTokens):
        # The model learns to write it. Each token once.
        eos = tuple(dict.fromkeys((*eos, *of_answers)))
    # Rotary positions know longer sequences than those of a fine-tuning.
    block = max(data.train.seq_length, metadata.block or 0)
    return replace(metadata, block=block, eos=eos)


def start_from(run: Run, model: ParallelModel, weights: Weights | None) -> None:
    """Load the weights that a run starts from. A run that resumes from a checkpoint has its own. A collective."""
    if weights is None or run.folder.resumes:
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


def check_prompt(prompt: str | None, job: Job) -> None:
    """Raises ConfigError or DataError for a prompt that does not fit."""
    # Here too it is refused before the ranks meet, and not at the first evaluation.
    if prompt is not None:
        data = job.data
        encode_prompt(prompt, data.tokenizer, data.train.seq_length, job.sizes.vocab_size, job.metadata.bos)


def log_sample(run: Run, model: ParallelModel, job: Job, prompt: str | None) -> None:
    """Have the model continue the text of ``--prompt``; log it, and keep it in the record. A collective."""
    if prompt is None:
        return
    tokenizer = job.data.tokenizer
    vocab_size = job.sizes.vocab_size
    # The most tokens that the model sees at once.
    block = job.data.train.seq_length
    tokens = encode_prompt(prompt, tokenizer, block, vocab_size, job.metadata.bos)
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
            job.metadata.eos,
            job.metadata.bos,
        )
    run.log.info("sample after step %d:\n%s", run.clock.step, text, stacklevel=2)
    earlier = run.facts.get("samples", [])
    run.describe(samples=[*earlier, {"iter": run.clock.step, "text": text}])
