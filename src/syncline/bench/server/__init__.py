"""The parameter server beside a bare echo, how many servers pay, and a soak: `syncline bench server`."""
