package git

import (
	"bytes"
	"fmt"
)

// records are the parts of an output that a zero byte ends. Each is split off when it is read: a
// list of the records of an output of zero bytes alone would take 24 times its memory.
type records struct{ unread []byte }

// newRecords returns the records of the output of a command. Truncated output may end within a
// record, which is dropped.
func newRecords(command string, data []byte, truncated bool) (records, error) {
	end := bytes.LastIndexByte(data, 0) + 1
	if end < len(data) && !truncated {
		return records{}, fmt.Errorf("%w: %s does not end with a zero byte", ErrOutput, command)
	}
	return records{data[:end]}, nil
}

// next returns the next record, if there is one.
func (r *records) next() (record []byte, ok bool) {
	record, r.unread, ok = bytes.Cut(r.unread, []byte{0})
	return record, ok
}

func (r *records) empty() bool { return len(r.unread) == 0 }
