//go:build !race

package policy

// raceFactor is how many times more memory and time a program takes with the race
// detector.
const raceFactor = 1
