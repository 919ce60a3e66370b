"""What hardware is: the device table, occupancy, memory that counts its bytes."""
