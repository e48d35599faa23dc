package main

import (
	"slices"
	"sync"
)

const ctrlC = '\x03'

// escape is what follows ~ at the beginning of a line.
type escape byte

const (
	escapeDisconnect escape = '.'
	escapeHelp       escape = '?'
)

// keyFilter finds escapes in what is typed, as ssh does.
type keyFilter struct {
	lineStart bool
	tilde     bool // was typed at the beginning of a line, and is not passed on yet
}

// filter returns what is to be passed on, and the last escape. Nothing after escapeDisconnect is
// passed on.
func (k *keyFilter) filter(keys []byte) (typed []byte, found escape) {
	for _, key := range keys {
		if k.tilde {
			k.tilde = false
			switch escape(key) {
			case escapeDisconnect:
				return typed, escapeDisconnect
			case escapeHelp:
				found = escapeHelp
				continue
			}
			typed = append(typed, '~')
			if key == '~' {
				k.lineStart = false
				continue
			}
		} else if k.lineStart && key == '~' {
			k.tilde = true
			continue
		}
		typed = append(typed, key)
		k.lineStart = key == '\r' || key == '\n'
	}
	return typed, found
}

// maxQueuedKeys is how much of what is typed waits for the connection. More is not read from
// the keyboard, so that no part of a text that is pasted is lost.
const maxQueuedKeys = 1 << 20

// keyQueue holds what was typed and not sent yet.
type keyQueue struct {
	changed chan struct{} // has an element when there is something

	mu    sync.Mutex
	keys  []byte
	space chan struct{} // closed when there is space; nil unless add waits
}

// add waits while the queue is full.
func (q *keyQueue) add(keys []byte) {
	if len(keys) == 0 {
		return
	}
	for {
		q.mu.Lock()
		if len(q.keys) < maxQueuedKeys {
			break
		}
		q.space = make(chan struct{})
		space := q.space
		q.mu.Unlock()
		<-space
	}
	q.keys = append(q.keys, keys...)
	q.mu.Unlock()
	select {
	case q.changed <- struct{}{}:
	default:
	}
}

// drain returns the keys and empties the queue.
func (q *keyQueue) drain() []byte {
	q.mu.Lock()
	defer q.mu.Unlock()
	keys := q.keys
	q.keys = nil
	if q.space != nil {
		close(q.space)
		q.space = nil
	}
	return slices.Clip(keys)
}
