#!/bin/bash
# A command as in runs/speedrun.sh of nanochat; values of our own.
python -m scripts.tok_train
# base_train is started once, below
torchrun --standalone --nproc_per_node=8 -m scripts.base_train -- --depth=24 \
    --target-param-data-ratio=9.5 --device-batch-size=16 --fp8 --run=$WANDB_RUN
