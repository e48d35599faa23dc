package decode_test

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"github.com/doze-run/doze/policies/sdk/internal/decode"
)

type inner struct {
	Paths []string `json:"paths"`
}

type outer struct {
	Text   string            `json:"text"`
	Flag   bool              `json:"flag"`
	Count  int               `json:"count"`
	Small  uint8             `json:"small"`
	Ratio  float64           `json:"ratio"`
	Also   []inner           `json:"also"`
	Labels map[string]string `json:"labels"`
	Maybe  *int              `json:"maybe"`
	Plain  string
	hidden string
	Not    string `json:"-"`
}

func TestStrictReadsAsEncodingJSONDoes(t *testing.T) {
	for _, text := range []string{
		`{}`, ` { } `, `null`,
		`{"text":"a","flag":true,"count":-12,"small":255,"ratio":1.5e3}`,
		`{"also":[{"paths":["/a","/b"]},{}],"labels":{"a":"b","":"c"},"maybe":3,"Plain":"x"}`,
		`{"text":"\"\\\/\b\f\n\r\t\u0041\u00fc\ud83d\ude00ü😀"}`,
		`{"also":null,"labels":null,"maybe":null,"text":null}`,
		`{"also":[],"labels":{}}`,
		"{\n\t\"count\" : 0 ,\r\n \"ratio\":-0.25}",
	} {
		var got, want outer
		if err := json.Unmarshal([]byte(text), &want); err != nil {
			t.Fatal(err)
		}
		if err := decode.Strict([]byte(text), &got); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: got %+v (%v), want %+v", text, got, err, want)
		}
	}
}

func TestErrorsNameThePositionAndTheRemedy(t *testing.T) {
	for text, want := range map[string]string{
		``:                                "line 1, column 1: the JSON ends where an object should be",
		`[]`:                              "this is an object, not a list",
		`{"text":1}`:                      "text: this is text, not a number",
		`{"flag":"x"}`:                    "flag: this is true or false, not text",
		`{"count":1.5}`:                   "count: this is a whole number",
		`{"count":99999999999999999999}`:  "count: this is a whole number",
		`{"small":256}`:                   "small: this is a whole number from 0",
		`{"small":-1}`:                    "small: this is a whole number from 0",
		`{"ratio":1e999}`:                 "ratio: this number is too large",
		`{"also":{}}`:                     "also: this is a list, not an object",
		`{"also":[{},{"paths":["/",3]}]}`: "also[1].paths[1]: this is text, not a number",
		`{"also":[{"path":[]}]}`:          `also[0]: there is no "path" here, but paths`,
		`{"Text":"a"}`:                    `there is no "Text" here, but text, flag`,
		`{"hidden":"a"}`:                  `there is no "hidden"`,
		`{"-":"a"}`:                       `there is no "-"`,
		`{"text":"a","text":"b"}`:         "text: duplicate name",
		`{"labels":{"a":"1","a":"2"}}`:    "labels.a: duplicate name",
		`{"text":"a"} x`:                  "there is more after the value",
		`{"text":"a",}`:                   "a name in quotes",
		`{"text" "a"}`:                    "a colon",
		`{"text":"a"`:                     "the JSON ends where a comma or } should be",
		`{"also":[{} {}]}`:                "a comma or ]",
		`{"text":"a`:                      "the JSON ends within text",
		"{\n \"text\": \"a\nb\"}":         "line 2, column 12: control characters",
		"{\"text\":\"\xff\"}":             "not UTF-8",
		`{"text":"\x"}`:                   "not an escape",
		`{"text":"\ud83d"}`:               "not an escape",
		`{"text":"\u12"}`:                 "not an escape",
		`{"count":01}`:                    "a comma or }",
		`{"count":-}`:                     "number",
		`{"count":+1}`:                    "there should be a number",
		`{"ratio":1.}`:                    "a digit",
		`{"ratio":1e}`:                    "a digit",
		`{"flag":tru}`:                    "true or false",
		"\x00":                            "there should be an object",
	} {
		var v outer
		if err := decode.Strict([]byte(text), &v); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", text, err, want)
		}
	}
	var none struct{}
	if err := decode.Strict([]byte(`{"a":1}`), &none); err == nil || !strings.Contains(err.Error(), "nor any other") {
		t.Errorf("got %v", err)
	}
	var unfit struct{ F func() }
	if err := decode.Strict([]byte(`{"F":1}`), &unfit); err == nil || !strings.Contains(err.Error(), "func()") {
		t.Errorf("got %v", err)
	}
}

func TestLenientSkipsUnknownFields(t *testing.T) {
	var v inner
	text := `{"x":{"a":[1,-2.5e3,"s",true,false,null,{}]},"paths":["/"],"y":[[]],"z":"\u0041"}`
	if err := decode.Lenient([]byte(text), &v); err != nil || len(v.Paths) != 1 {
		t.Errorf("got %+v, %v", v, err)
	}
	deep := `{"x":` + strings.Repeat("[", 100_000) + `}`
	if err := decode.Lenient([]byte(deep), &v); err == nil || !strings.Contains(err.Error(), "too deeply") {
		t.Errorf("got %v", err)
	}
}

// FuzzStrict checks that accepted text is JSON, and that encoding/json reads it in the same
// way.
func FuzzStrict(f *testing.F) {
	f.Add([]byte(`{"text":"a\u00fc","count":-1,"also":[{"paths":["x"]}],"labels":{"a":"b"},"maybe":1,"ratio":0.5}`))
	f.Add([]byte(`{"small":1e1}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		var got, want outer
		if decode.Strict(text, &got) != nil {
			return
		}
		if err := json.Unmarshal(text, &want); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: got %+v, encoding/json has %+v (%v)", text, got, want, err)
		}
	})
}
