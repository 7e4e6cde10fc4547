"""A Vision Transformer, under the name of the examples.

    launch python3 -m mmm.examples.vit --max_iters 10

The program is ``mmm.trainer.vit``.
"""

from mmm.run.command_line import parse, run_main
from mmm.trainer import vit

if __name__ == "__main__":
    run_main(lambda: vit.train(parse(vit.Config, vit.__doc__)))
