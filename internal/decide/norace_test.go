//go:build !race

package decide

// RaceDetector is set under the race detector, which costs more.
const RaceDetector = false
