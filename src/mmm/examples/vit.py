"""A Vision Transformer: the trainer ``mmm.trainer.vit``, under the name of an example.

    launch python3 -m mmm.examples.vit --max_iters 10

Read ``mmm.trainer.vit`` for the program.
"""

from mmm.run.command_line import parse, run_main
from mmm.trainer import vit
from mmm.trainer.vit import Config

if __name__ == "__main__":
    run_main(lambda: vit.train(parse(Config, vit.__doc__)))
