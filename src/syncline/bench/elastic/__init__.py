"""`syncline bench elastic`: how a job survives the loss of its workers and servers, and how fast it continues."""
