//go:build race

package policy

// raceEnabled: memory figures are those of the detector.
const raceEnabled = true
