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

// encode returns v as a value of less than limit bytes.
func encode(what string, v any, limit int) ([]byte, error) {
	body, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", what, err)
	}
	return seal(what, encodingJSON, body, limit, "; make env, labels or declared processes smaller")
}

func decode(value []byte, into any) error {
	body, err := unseal(encodingJSON, value)
	if err != nil {
		return err
	}
	return json.Unmarshal(body, into)
}

// seal returns the value of a body with that encoding. advice is for an error about its size.
func seal(what string, encoding byte, body []byte, limit int, advice string) ([]byte, error) {
	if len(body) >= limit {
		return nil, &sandbox.InvalidError{
			Field:  what,
			Reason: "its record has " + strconv.Itoa(len(body)) + " bytes",
			Want:   "at most " + strconv.Itoa(limit-1) + advice,
		}
	}
	return append([]byte{encoding}, body...), nil
}

// unseal returns the body of a value, which shares its memory.
func unseal(encoding byte, value []byte) ([]byte, error) {
	if len(value) == 0 {
		return nil, errors.New("record is empty")
	}
	if value[0] != encoding {
		return nil, fmt.Errorf("record has encoding %d, this build reads %d: a newer doze wrote it", value[0], encoding)
	}
	return value[1:], nil
}
