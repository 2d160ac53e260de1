"""gradgen for PyTorch: `attach` an unchanged model to a gradient manager, and step an optimizer on this
rank's shards.
"""

from gradgen.torch.attach import Attachment, attach
from gradgen.torch.names import AttachError
from gradgen.torch.optimizer import ShardedOptimizer

__all__ = ["AttachError", "Attachment", "ShardedOptimizer", "attach"]
