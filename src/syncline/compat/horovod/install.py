"""After this import, a script may `import horovod.torch as hvd`."""

from syncline.compat.module_aliases import install_aliases

install_aliases("horovod")
