"""Mistakes for the proof to find: each function here breaks this process. `make mutants` has those of the package."""

import os
import signal

import torch.distributed as dist

import mmm.parallel.parallel_model
from mmm.layout import Layout


def gradients_averaged_over_dp():
    """FSDP divides by the number of ranks, as it does by itself."""
    import mmm.parallel.dp.fsdp

    mmm.parallel.dp.fsdp.FSDPModule.set_gradient_divide_factor = lambda self, factor: None
    mmm.parallel.dp.fsdp.FSDPModule.set_force_sum_reduction_for_comms = lambda self, force: None


def same_samples_on_all_dp_ranks():
    Layout.dp_coordinate = lambda self, rank: 0


def rank_1_of_2_is_killed():
    import mmm_lab.parity.subject as subject

    right = subject.parallelize

    def broken(*args):
        if (dist.get_rank(), dist.get_world_size()) == (1, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        return right(*args)

    subject.parallelize = broken


def optimizer_gets_whole_parameters():
    """Under ZeRO the whole parameters have no gradients: an optimizer that is given them updates nothing."""

    def named_parameters(self):
        for module in self.modules.values():
            yield from module.module.named_parameters()

    mmm.parallel.parallel_model.ParallelModel.named_parameters = named_parameters


def keys_bias_gets_a_gradient():
    """The gradient of a key's bias, which is 0, is that of the query's."""
    right = mmm.parallel.parallel_model.ParallelModel.forward_backward

    def forward_backward(self, *args, **named):
        loss = right(self, *args, **named)
        parameters = dict(self.named_parameters())
        for name, parameter in parameters.items():
            if name.endswith("key.bias"):
                parameter.grad = parameters[name.replace("key", "query")].grad
        return loss

    mmm.parallel.parallel_model.ParallelModel.forward_backward = forward_backward
