"""An S3 server on this machine, a proxy before it that makes requests fail, and what is saved through them."""
