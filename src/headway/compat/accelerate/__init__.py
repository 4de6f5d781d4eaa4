"""What scripts written for Accelerate import or read, as thin views of Headway's own parts."""
