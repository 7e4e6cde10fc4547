"""Mistakes that people make in parallel programs, planted: each function here breaks this process."""

import os
import signal

import mmm.parallel.parallel_model
import mmm.parallel.plans.transformer
import mmm.parallel.pp.pipeline
from mmm.layout import Layout
from mmm.parallel.tp.replicated import Replicated, _SameGradients


def gradients_not_summed_over_dp():
    """Each data-parallel rank goes on with the gradients of its own samples."""
    sync = mmm.parallel.parallel_model.sync_gradients
    mmm.parallel.parallel_model.sync_gradients = lambda model, now: sync(model, False)


def gradients_averaged_over_dp():
    """FSDP divides by the number of ranks, as it does by itself."""
    import mmm.parallel.dp.fsdp

    mmm.parallel.dp.fsdp.FSDPModule.set_gradient_divide_factor = lambda self, factor: None
    mmm.parallel.dp.fsdp.FSDPModule.set_force_sum_reduction_for_comms = lambda self, force: None


def mean_of_each_microbatch():
    """The loss is divided by the targets of a micro-batch, not of the global batch."""
    right = mmm.parallel.parallel_model.ParallelModel.step

    def step(self, inputs, targets, count, *rest, **named):
        return right(self, inputs, targets, targets.numel() // self.microbatches, *rest, **named)

    mmm.parallel.parallel_model.ParallelModel.step = step


def gradients_divided_by_microbatches():
    """PyTorch's pipelines scale gradients as if each micro-batch's loss were a mean."""
    right = mmm.parallel.pp.pipeline.Pipeline.__init__

    def init(self, *given, **named):
        right(self, *given, **named)
        self.schedule.scale_grads = True

    mmm.parallel.pp.pipeline.Pipeline.__init__ = init


def same_samples_on_all_dp_ranks():
    Layout.dp_coordinate = lambda self, rank: 0


def norms_not_summed_over_sequence():
    """Norms between sharded matrices see a part of the sequence, and nobody adds up the gradients of the parts."""

    _SameGradients.watch = lambda self, module: None  # which would find it
    mmm.parallel.plans.transformer.SequenceParallel = lambda **_: Replicated()


def _on_rank_1(do):
    import mmm.parity.train as train

    right = train._train

    def broken(rank, *given):
        if (rank.rank, rank.world_size) == (1, 2):
            do()
        return right(rank, *given)

    train._train = broken


def rank_1_of_2_is_killed():
    _on_rank_1(lambda: os.kill(os.getpid(), signal.SIGKILL))


def optimizer_gets_whole_parameters():
    """Under ZeRO the whole parameters have no gradients: an optimizer that is given them updates nothing."""

    def named_parameters(self):
        for module in self.modules.values():
            yield from module.module.named_parameters()

    mmm.parallel.parallel_model.ParallelModel.named_parameters = named_parameters


def keys_bias_gets_a_gradient():
    """The gradient of a key's bias, which is 0, is that of the query's."""
    right = mmm.parallel.parallel_model.ParallelModel.step

    def step(self, *given, **named):
        loss = right(self, *given, **named)
        parameters = dict(self.named_parameters())
        for name, parameter in parameters.items():
            if name.endswith("key.bias"):
                parameter.grad = parameters[name.replace("key", "query")].grad
        return loss

    mmm.parallel.parallel_model.ParallelModel.step = step


def _buffers_of_ranks(named, spoil):
    """`spoil` each buffer of that name when a rank has given its model memory; the reference keeps its own."""
    right = mmm.parallel.parallel_model.materialize

    def materialize(model, *given, **fields):
        right(model, *given, **fields)
        for name, buffer in model.named_buffers():
            if name.endswith(named):
                spoil(buffer)

    mmm.parallel.parallel_model.materialize = materialize


def mask_buffers_of_ranks_are_spoiled():
    """A causal mask lets everything through."""
    _buffers_of_ranks("mask", lambda mask: mask.fill_(True))


def constants_of_ranks_are_spoiled():
    """The spread of the data is 1, as a weight of a norm would be."""
    _buffers_of_ranks("spread", lambda spread: spread.fill_(1))


def ring_passes_over_documents():
    """Attention over a ring crosses the ends of documents."""
    import mmm.parallel.cp.ring as ring

    ring._first_keys = lambda *_: ()


def targets_counted_by_each_rank():
    """Ranks whose samples have more targets count for as much as the others."""
    import mmm.parallel.parallel_model as parallel_model
    from mmm.layout import PADDING

    def count(self, targets):
        return (targets != PADDING).sum() * self.layout.dp

    parallel_model.ParallelModel.count_targets = count


def documents_of_the_first_microbatch():
    """Every micro-batch of a pipeline has the documents of the first."""
    right = mmm.parallel.pp.pipeline.Pipeline._run

    def run(self, schedule, inputs, targets, split, unsplit):
        first = {name: each[: len(each) // 2].repeat(2, 1) for name, each in split.items()}
        return right(self, schedule, inputs, targets, first, unsplit)

    mmm.parallel.pp.pipeline.Pipeline._run = run


def dropout_of_each_rank():
    """Ranks draw from their own generators."""
    import mmm.models.dropout as dropout

    right = dropout.Dropout.forward
    dropout.Dropout.forward = lambda self, x, keys: right(self, x, keys if _alone() else None)


def dropout_of_the_first_shard():
    """Every rank of tp drops the places of the first one's hidden units."""
    from mmm.parallel.tp.tensor_parallel import ShardedDropout

    ShardedDropout._apply = lambda self, module, mesh: module


def _alone():
    import torch.distributed as dist

    return not dist.is_initialized() or dist.get_world_size() == 1
