"""Every name of PyTorch that begins with an underscore, or lives in an underscored module, and that `mmm` uses.

PyTorch promises nothing of such names. No other file of the package touches one, so who moves to another PyTorch reads
this folder, a file a subject:

    module        modules, tensors and optimizers
    autograd      the backward that is under way
    operators     the dispatcher, kernels without a public name, trees of tensors
    groups        process groups, meshes, DTensor
    fsdp          FSDP's records of its units
    checkpoint    DCP's files
    pipelining    what stages send each other
    fake          tensors without elements
    dry_run       what a dry run replaces, groups without ranks, memory counted by PyTorch
    dynamo        torch.compile
    startup       for the fork server, without torch

``Private:`` begins what each name is called, in which versions of PyTorch it was seen, and what would replace it
("nothing": PyTorch has no public way, and none is announced). Seen means: in the sources of 2.10, 2.11, 2.12, 2.13 and
2.14.1; what the tests ran on, docs/install.md says. A file's top imports what ``import torch`` has loaded by then, so
that this package costs no more than torch; the rest is imported in functions.

Classes of ours override private methods of PyTorch's, or set an attribute, at their own place. All were seen in 2.10 to
2.14; behind the semicolon stands what would replace it:

    optim/adamw.py, optim/muon.py           Optimizer._init_group: the tensors that an optimizer's kernel gets; nothing
    optim/muon.py                           Optimizer._step_supports_amp_scaling; nothing
    optim/grad_scaler.py                    GradScaler._unscale_grads_; nothing
    parallel/dp/wrapped.py                  Module._apply, to refuse it; nothing
    parallel/tp/, parallel/memory/chunked_loss.py   ParallelStyle._apply, which PyTorch's tutorials override as well
    checkpoint/storage.py                   FileSystemReader._slice_file, to know the file; an error that names it
"""
