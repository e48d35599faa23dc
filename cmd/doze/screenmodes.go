package main

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// maxModes and maxMode bound what a program can have this program store.
const (
	maxModes = 64
	maxMode  = 99_999
)

// screenModes are the private modes of a terminal (DECSET), such as another screen or a hidden
// cursor, that a program has changed.
type screenModes struct {
	state   modeState
	mode    int
	params  []int
	changed map[int]bool // modes whose setting differs from the initial one
}

type modeState byte

const (
	modeNone   modeState = iota
	modeEscape           // after ESC
	modeCSI              // after ESC [
	modeParams           // after ESC [ ?
)

// initiallySet are the modes that are set at first: line wrap and the cursor.
var initiallySet = map[int]bool{7: true, 25: true}

// note follows what is printed.
func (m *screenModes) note(output []byte) {
	for len(output) > 0 {
		if m.state == modeNone {
			i := bytes.IndexByte(output, '\x1b')
			if i < 0 {
				return
			}
			m.state, output = modeEscape, output[i+1:]
			continue
		}
		m.next(output[0])
		output = output[1:]
	}
}

func (m *screenModes) next(b byte) {
	switch {
	case b == '\x1b':
		m.state = modeEscape
	case m.state == modeEscape && b == '[':
		m.state = modeCSI
	case m.state == modeEscape && b == 'c': // a full reset
		m.state, m.changed = modeNone, nil
	case m.state == modeCSI && b == '?':
		m.state, m.mode, m.params = modeParams, 0, m.params[:0]
	case m.state == modeParams && '0' <= b && b <= '9':
		m.mode = min(m.mode*10+int(b-'0'), maxMode+1)
	case m.state == modeParams && b == ';' && len(m.params) < maxModes:
		m.params, m.mode = append(m.params, m.mode), 0
	case m.state == modeParams && (b == 'h' || b == 'l'):
		for _, mode := range append(m.params, m.mode) {
			m.set(mode, b == 'h')
		}
		m.state = modeNone
	default:
		m.state = modeNone
	}
}

func (m *screenModes) set(mode int, on bool) {
	switch {
	case on == initiallySet[mode]:
		delete(m.changed, mode)
	case 0 < mode && mode <= maxMode && len(m.changed) < maxModes:
		if m.changed == nil {
			m.changed = map[int]bool{}
		}
		m.changed[mode] = true
	}
}

// undo returns what restores the initial modes and colors.
func (m *screenModes) undo() string {
	var text strings.Builder
	for _, mode := range slices.Sorted(maps.Keys(m.changed)) {
		action := 'l'
		if initiallySet[mode] {
			action = 'h'
		}
		fmt.Fprintf(&text, "\x1b[?%d%c", mode, action)
	}
	m.changed = nil
	return text.String() + "\x1b[0m"
}
