package server

import (
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/guest"
)

func TestFileWithoutSizeIsReadWholeOrNotAtAll(t *testing.T) {
	for size, code := range map[int]string{0: "", 10: "", maxUnsized: "", maxUnsized + 1: guest.CodeTooLarge, 2 * maxUnsized: guest.CodeTooLarge} {
		b, err := readSmall(io.LimitReader(strings.NewReader(strings.Repeat("x", 2*maxUnsized)), int64(size)), 0)
		var refusal *guest.Error
		if errors.As(err, &refusal) != (code != "") || code != "" && refusal.Code != code || code == "" && (err != nil || len(b) != size) {
			t.Errorf("of %d bytes it reads %d, %v", size, len(b), err)
		}
	}
}
