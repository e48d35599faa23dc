package jsonfile_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/doze-run/doze/cmd/internal/jsonfile"
)

type value struct {
	Name string         `json:"name"`
	List []string       `json:"list"`
	More map[string]int `json:"more"`
	Sub  *value         `json:"sub"`
}

func TestErrorsHavePositions(t *testing.T) {
	for text, want := range map[string]string{
		"":     "line 1, column 1: the file is empty",
		" \n ": "line 2, column 2: the file is empty",
		"{\n  \"name\": \"a\"\n  \"list\": []\n}": `line 3, column 3: invalid JSON: invalid character '"' after object key:value pair`,
		"{\n\t\"name\": \"ä\", nope }":            "line 2, column 15: invalid JSON: invalid character 'n'",
		"{\"name\": \"a\",\n}":                    "line 2, column 1: invalid JSON: invalid character '}'",
		"{\"name\":\n\"a\"":                       "line 2, column 4: the JSON value is incomplete",
		"{\"name\": 1}":                           "line 1, column 10: name is a JSON number; it should be text",
		"{\n\"sub\": {\"list\": \"a\"}}":          "line 2, column 19: sub.list is a JSON string; it should be a list",
		"[]":                                      "line 1, column 1: the value is a JSON array; it should be an object",
		"{\n \"sub\": {\n  \"nope\": 1}}":         `line 3, column 3: unknown field "nope"`,
		"{\"sub\": {\"nope\": 1}, \"nope\": 2}":   `unknown field "nope"`,
		"{\"name\": \"x\"}\n{}":                   "line 2, column 1: unexpected text after",
	} {
		var v value
		if err := jsonfile.Decode([]byte(text), &v); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%q: got %v, want %s", text, err, want)
		}
	}
	var v value
	if err := jsonfile.Decode([]byte(" {\"name\": \"a\", \"more\": {\"nope\": 1}} \n"), &v); err != nil || v.Name != "a" || v.More["nope"] != 1 {
		t.Errorf("got %+v, %v", v, err)
	}
}

func TestErrorsNameTheFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "rules.json")
	if err := jsonfile.Read(file, new(value)); !os.IsNotExist(err) {
		t.Errorf("got %v", err)
	}
	if err := os.WriteFile(file, []byte("{\n]"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := jsonfile.Read(file, new(value)); err == nil || !strings.HasPrefix(err.Error(), file+": line 2, column 1: ") {
		t.Errorf("got %v", err)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(`{"sub":{"nope":[{"a":"nope"}]}}`)
	f.Fuzz(func(t *testing.T, text string) {
		var v value
		_ = jsonfile.Decode([]byte(text), &v) // must not panic
	})
}
