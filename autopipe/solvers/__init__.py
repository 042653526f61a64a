"""Where to cut: exact solvers over tables of stage costs, and the brute force that tests compare them with."""
