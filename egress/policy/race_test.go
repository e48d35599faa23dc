//go:build race

package policy

// raceEnabled: memory figures include the detector's.
const raceEnabled = true
