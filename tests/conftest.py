"""Without a GPU, kernels run under Triton's interpreter, which must be chosen before it loads."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
