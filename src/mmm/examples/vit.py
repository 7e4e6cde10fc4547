"""A Vision Transformer, under the name of the examples.

    launch python3 -m mmm.examples.vit --max_iters 10

The program is ``mmm.trainer.vit``.
"""

from mmm.trainer.flags import run_main
from mmm.trainer.vit import main

if __name__ == "__main__":
    run_main(main)
