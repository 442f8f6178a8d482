"""What takes seconds to import and every process of the zoo needs, imported once."""

import torch._dynamo
import torch.profiler
import transformers.modeling_utils
import transformers.models.auto.modeling_auto

import fxpasses
import tests.zoo.worker

torch.set_num_threads(1)
__all__ = ["fxpasses", "tests", "torch", "transformers"]
