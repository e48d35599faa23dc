// Package preset has named lists of the hosts that code hosts, model APIs and
// installers need, so that rules can name the service: `preset:github`.
//
// A list has what the service's own clients connect to by default and nothing else.
// Hosts that strangers can have content on are left out unless the service does not work
// without them; then the description says so. Names are stable: stored rules have them.
package preset

import (
	"fmt"
	"slices"
	"strings"
)

// Prefix of a preset's name where a host pattern is expected. No host name has a colon.
const Prefix = "preset:"

// Preset is a named list of host patterns.
type Preset struct {
	Name        string   `json:"name"`
	Description string   `json:"description"`
	Hosts       []string `json:"hosts"` // names, and `*.example.com` for all below
}

// All returns the presets by name. The caller does not change them.
func All() []Preset { return presets }

// Parse returns the preset that a host pattern such as `preset:github` names. Other
// patterns are not presets.
func Parse(pattern string) (p Preset, isPreset bool, err error) {
	name, isPreset := strings.CutPrefix(pattern, Prefix)
	if !isPreset {
		return Preset{}, false, nil
	}
	i, found := slices.BinarySearchFunc(presets, name, func(p Preset, name string) int { return strings.Compare(p.Name, name) })
	if !found {
		return Preset{}, true, fmt.Errorf("%.80q is not a preset; use one of %s", name, strings.Join(names(), ", "))
	}
	return presets[i], true, nil
}

func names() []string {
	list := make([]string, len(presets))
	for i, p := range presets {
		list[i] = p.Name
	}
	return list
}

// presets in the order of their names.
var presets = []Preset{
	{"anthropic", "The Anthropic API", []string{"api.anthropic.com"}},
	{"bitbucket", "Bitbucket Cloud: git over HTTPS and the API", []string{"bitbucket.org", "api.bitbucket.org"}},
	{"deepseek", "The DeepSeek API", []string{"api.deepseek.com"}},
	{"gemini", "Google's Gemini API", []string{"generativelanguage.googleapis.com"}},
	{"github", "GitHub: git over HTTPS, the API, archives, releases, raw files and LFS. Everybody can have content there", []string{
		"github.com", "api.github.com", "uploads.github.com", "codeload.github.com", "gist.github.com", "*.githubusercontent.com",
		"github-cloud.s3.amazonaws.com",
	}},
	{"gitlab", "GitLab.com: git over HTTPS and the API", []string{"gitlab.com"}},
	{"groq", "The Groq API", []string{"api.groq.com"}},
	{"huggingface", "Hugging Face: models, data sets, the API and inference. Everybody can have content there", []string{
		"huggingface.co", "*.huggingface.co", "*.hf.co",
	}},
	{"mistral", "The Mistral API", []string{"api.mistral.ai"}},
	{"nodejs", "Node.js releases and headers (nvm, node-gyp)", []string{"nodejs.org"}},
	{"openai", "The OpenAI API", []string{"api.openai.com"}},
	{"openrouter", "The OpenRouter API", []string{"openrouter.ai"}},
	{"playwright", "Browsers that Playwright installs", []string{"cdn.playwright.dev", "playwright.download.prss.microsoft.com"}},
	{"rustup", "Rust toolchains (rustup)", []string{"static.rust-lang.org"}},
	{"xai", "The xAI API", []string{"api.x.ai"}},
}
