"""What vescale_ckpt gives to others: nothing yet.

`vescale_register_storage` with a storage on fsspec will be implemented here.
"""
