"""Every name of PyTorch that begins with an underscore, or lives in an underscored module, and that `mmm` uses.

PyTorch promises nothing about such names. No other file of the package touches one, so whoever moves to another version
of PyTorch only has to read this folder. It has one file for each subject:

    module        modules, tensors and optimizers
    autograd      the backward pass that is running
    operators     the dispatcher, kernels without a public name, trees of tensors
    groups        process groups, meshes, DTensor
    fsdp          FSDP's records of its units
    checkpoint    DCP's files
    pipelining    what stages send each other
    fake          tensors without elements
    dry_run       what a dry run replaces, groups without ranks, memory counted by PyTorch
    dynamo        torch.compile
    replace       how a function of PyTorch's is replaced for a while
    faults        what some PyTorch cannot do

A paragraph or comment that begins with ``Private:`` gives the private names, the versions of PyTorch in which they were
seen, and the public name that could replace them. "No public replacement" means that PyTorch has none, and has
announced none. "Seen" means: in the sources of 2.10, 2.11, 2.12, 2.13 and 2.14.1. docs/install.md says which versions
the tests have run on. The imports at the top of a file only name what ``import torch`` has loaded anyway, so that this
package costs no more than torch; everything else is imported in functions.

Some classes of ours override private methods of PyTorch's, or set a private attribute, where they are defined. All of
these were seen in 2.10 to 2.14:

    optim/adamw.py, optim/muon.py           Optimizer._init_group: the tensors that an optimizer's kernel gets. No
                                            public replacement
    optim/muon.py                           Optimizer._step_supports_amp_scaling. No public replacement
    optim/grad_scaler.py                    GradScaler._unscale_grads_. No public replacement
    parallel/dp/wrapped.py                  Module._apply, to refuse it. No public replacement
    parallel/tp/, parallel/memory/chunked_loss.py   ParallelStyle._apply, which PyTorch's tutorials override as well
    checkpoint/storage.py                   FileSystemReader._slice_file, to know the file. It could be replaced by an
                                            error that names the file
"""
