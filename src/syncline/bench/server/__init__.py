"""`syncline bench server`: rates compared with a bare echo, the best number of servers, and a soak test."""
