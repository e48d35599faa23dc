package store

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"github.com/doze-run/doze/runtime/sandbox"
)

// A value is one byte with the version of its encoding, then JSON. Within a version, fields
// are only added, and readers ignore unknown fields.
const encodingJSON = 1

// maxRecord bounds one value, in bytes: a transaction holds at least one, and Badger accepts
// transactions of up to 15 % of a memtable.
const maxRecord = 800 << 10

var errEmptyRecord = errors.New("record is empty")

func encode(what string, v any, limit int) ([]byte, error) {
	body, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", what, err)
	}
	if len(body) >= limit {
		return nil, &sandbox.InvalidError{
			Field:  what,
			Reason: "its record has " + strconv.Itoa(len(body)) + " bytes",
			Want:   "at most " + strconv.Itoa(limit-1) + "; make env, labels or declared processes smaller",
		}
	}
	return append([]byte{encodingJSON}, body...), nil
}

func decode(value []byte, into any) error {
	if len(value) == 0 {
		return errEmptyRecord
	}
	if value[0] != encodingJSON {
		return fmt.Errorf("record has encoding %d, this build reads %d: a newer doze wrote it", value[0], encodingJSON)
	}
	return json.Unmarshal(value[1:], into)
}
