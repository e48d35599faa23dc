package store

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"slices"

	"github.com/doze-run/doze/runtime/sandbox"
)

// Keys begin with a prefix for their kind, so that one kind is one range. Each kind has its
// prefix here, and its methods in a file of its own:
//
//	n/                      the node's id
//	c/                      the count of commits
//	s/<sandbox id>          the record of a sandbox
//	p/<snapshot id>         the record of a snapshot
//	e/<sandbox id>/<seq>    an event; seq is 8 bytes, big-endian, so that byte
//	                        order is the order of the timeline
//	d/<kind>/<name>         a document; kinds have no slash, names may
var (
	nodeIDKey      = []byte("n/")
	commitsKey     = []byte("c/")
	sandboxPrefix  = []byte("s/")
	snapshotPrefix = []byte("p/")
)

// recordKey returns the key of the record with that prefix and id.
func recordKey(prefix []byte, id string) ([]byte, error) {
	return slices.Concat(prefix, []byte(id)), checkID(sandbox.ID(id))
}

var eventsPrefix = []byte("e/")

// isEvent reports whether the value of a key is an event.
func isEvent(key []byte) bool { return bytes.HasPrefix(key, eventsPrefix) }

func eventPrefix(id sandbox.ID) []byte {
	key := slices.Concat(eventsPrefix, []byte(id))
	return append(key, '/')
}

func eventKey(id sandbox.ID, seq uint64) []byte {
	return binary.BigEndian.AppendUint64(eventPrefix(id), seq)
}

// lastEventKey is where a reverse iteration over the timeline of id starts.
func lastEventKey(id sandbox.ID) []byte { return eventKey(id, math.MaxUint64) }

// eventSeq is the inverse of eventKey.
func eventSeq(id sandbox.ID, key []byte) uint64 {
	return binary.BigEndian.Uint64(key[len(eventPrefix(id)):])
}

// maxID bounds the ids in keys, in bytes. The Manager's ids have 12.
const maxID = 64

// checkID refuses ids that would make a key ambiguous.
func checkID(id sandbox.ID) error {
	if len(id) == 0 || len(id) > maxID {
		return &sandbox.InvalidError{Field: "id", Reason: fmt.Sprintf("is %d bytes long", len(id)), Want: "12 characters of [a-z0-9]"}
	}
	for _, c := range []byte(id) {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') {
			return &sandbox.InvalidError{Field: "id", Reason: fmt.Sprintf("has the byte %#x", c), Want: "12 characters of [a-z0-9]"}
		}
	}
	return nil
}
