package server

import (
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// Expressions of the reference below, for the output as Latin-1.
var (
	wholeSequence = regexp.MustCompile(`^\x1b[\x00-\x17\x19\x1c-\x1f]*(` +
		`\[[\x00-\x17\x19\x1c-\x3f]*[\x40-\x{ff}]|` + // CSI
		`\][^\x07\x18\x1a\x1b]*(\x07|\x1b\\)|` + // OSC
		`[PX^_][^\x18\x1a\x1b]*\x1b\\|` + // DCS, SOS, PM, APC
		`[\x20-\x2f][\x00-\x17\x19\x1c-\x2f]*[\x30-\x{ff}]|` +
		`[\x30-\x4f\x51-\x57\x59\x5a\\\x60-\x{ff}])`)
	canceledSequence = regexp.MustCompile(`^\x1b[^\x18\x1a\x1b]*[\x18\x1a]`)
	brokenSequence   = regexp.MustCompile(`^\x1b[^\x18\x1a\x1b]*`) // until the next one
)

// cleanPositions returns before which bytes of the output a terminal may begin.
func cleanPositions(output []byte) []bool {
	latin1 := make([]rune, len(output))
	for i, b := range output {
		latin1[i] = rune(b)
	}
	clean := make([]bool, len(output))
	within := false
	for i := 0; i < len(output); {
		clean[i] = !within && output[i]&0xC0 != 0x80
		within = false
		if output[i] != 0x1B {
			i++
			continue
		}
		rest := string(latin1[i:])
		sequence := wholeSequence.FindString(rest)
		if sequence == "" {
			sequence = canceledSequence.FindString(rest)
		}
		if sequence == "" {
			sequence, within = brokenSequence.FindString(rest), true
		}
		i += utf8.RuneCountInString(sequence)
	}
	return clean
}

// The output of a terminal has any bytes.
func FuzzEscapes(f *testing.F) {
	for _, output := range []string{
		"é→🌙\r\n\xff\x80", "\x1b[38;2;255;100;0mx", "\x1b]0;title\x07y", "\x1b]8;;http://a.test\x1b\\link", "\x1bP+q544e\x1b\\z",
		"\x1b_Gi=1;AAAA\x1b\\a", "\x1b^note\x07\x1b\\b", "\x1bXstring\x9c\x1b\\c", "\x1b$(Cd", "\x1b \x01Fe", "\x1b7f",
		"\x1b[1\x18g\x1b]0;t\x1ah\x1bP1\x18i\x1b(\x1aj", "\x1b]0;t\x1b[1mk\x1bPq\x1b\x1b\\l", "\x1b\x1b[1\x1b[2\x07mm", "\x1b\x07[\x7fn", "\x1b[1;", "\x1b]",
	} {
		f.Add([]byte(output), uint8(2))
	}
	f.Fuzz(func(t *testing.T, output []byte, part uint8) {
		output = output[:min(len(output), 4<<10)] // the reference takes quadratic time
		want := cleanPositions(output)
		var state, skipped escapes
		for i, b := range output {
			if i%(int(part)+1) == 0 {
				if skipped.skip(output[max(0, i-int(part)-1):i]); skipped != state {
					t.Fatalf("after %q the state is %d in parts, %d by bytes", output[:i], skipped, state)
				}
			}
			if got := state.clean(b); got != want[i] {
				t.Fatalf("a terminal may begin after %q, before %q: %v, want %v", output[:i], output[i:], got, want[i])
			}
			state.skip(output[i : i+1])
		}
	})
}

func TestScreenWithoutCleanPositionReplaysNothing(t *testing.T) {
	var s screen
	feed := func(output string) {
		for part := range slices.Chunk([]byte(output), 10_000) {
			s.print(part)
		}
	}
	feed("before\x1b]52;c;" + strings.Repeat("A", 300<<10))
	if got := s.clean(); got != s.end {
		t.Errorf("a terminal may begin %d bytes before the end, within the sequence", s.end-got)
	}
	feed("AA\x07after")
	if got := s.end - s.clean(); got != int64(len("after")) {
		t.Errorf("a terminal may begin %d bytes before the end", got)
	}
}
