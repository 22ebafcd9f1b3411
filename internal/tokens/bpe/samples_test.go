package bpe

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"unicode/utf8"
)

// samples are texts of our own: prose, code and data in many scripts.
var samples = []string{
	"The harbour master counted eleven boats before breakfast, and wrote the number down twice because she didn't trust the first. \"You'd have done the same,\" she'd say; they'll tell you it's habit, we've called it care, I'm not sure.\n\nNobody asked. IT'S FINE, THEY'LL SAY, WE'VE SEEN IT'S OK.",
	"func (q *queue) push(v int) error {\n\tif len(q.items) >= q.limit {\n\t\treturn fmt.Errorf(\"queue full: %d of %d\", len(q.items), q.limit)\n\t}\n\tq.items = append(q.items, v)\n\treturn nil\n}\n\n// drain empties it.\nfor i := 0; i < 1_000; i++ {}\n",
	"def median(xs):\n    xs = sorted(xs)\n    n = len(xs)\n    if not n:\n        raise ValueError('empty')\n    return xs[n // 2] if n % 2 else (xs[n // 2 - 1] + xs[n // 2]) / 2\n\n\nclass HTTPServerError2xx(Exception): pass\n",
	`{"name":"get_weather","arguments":{"city":"Zürich","days":[1,2,3],"unit":null,"nested":{"a":true,"b":-1.5e-10}},"id":"call_0f3a9c"}`,
	"{\n  \"type\": \"function\",\n  \"function\": {\n    \"name\": \"search\",\n    \"parameters\": {\"type\": \"object\", \"required\": [\"query\"]}\n  }\n}\n",
	"春天的早晨，河边的老人把渔网收好，慢慢地走回家。他说：“今天的鱼不多，可是天气很好。”邻居笑了，问他明天还来不来？\n\n他想了想，没有回答。１２３４个人，３０％。",
	"昨日は雨でしたが、今日は晴れています。図書館でコーヒーを飲みながら、新しい本を読みました。カタカナ・ひらがな・漢字ー゛゜",
	"어제는 비가 왔지만 오늘은 맑습니다. 도서관에서 새 책을 읽었어요. 각 각 각",
	"Вчера шёл дождь, а сегодня солнечно. Мы пошли в библиотеку и взяли 3 книги за 25,50 руб.",
	"أمس كان الجو ممطرًا واليوم مشمس. ذهبنا إلى المكتبة ١٢٣ وقرأنا كتابًا جديدًا.",
	"कल बारिश हुई थी, आज धूप है। हम पुस्तकालय गए और नई किताब पढ़ी। क़ ख़ ज्ञ श्री",
	"เมื่อวานฝนตก วันนี้แดดออก เราไปห้องสมุดและอ่านหนังสือเล่มใหม่",
	"Hôm qua trời mưa, hôm nay nắng đẹp. Chúng tôi đến thư viện đọc sách mới. Việt Tiếng",
	"Χθες έβρεχε, σήμερα έχει ήλιο. Πήγαμε στη βιβλιοθήκη. ΆΈΉ ᾳ ῼ ǅ ǈ",
	"אתמול ירד גשם והיום שמש. הָלַכְנוּ לַסִּפְרִיָּה",
	"😀 👍🏽 👨‍👩‍👧‍👦 🇨🇭🇯🇵 ❤️ ☃️ 1️⃣ 🏴󠁧󠁢󠁥󠁮󠁧󠁿 😀😀😀",
	"e\u0301 é a\u0323\u0301 ạ\u0301 \u212b \u2126 \u1e9b\u0323 \uac00\u11a8 \u1100\u1161\u11a8 o\u0308\u0308 q\u0307\u0323 \u0344 \ufb1d \U0001d15e",
	"a" + strings.Repeat("\u0301", 40) + strings.Repeat("\u0323", 3) + " b\u0327\u0301",
	"   leading\t\ttabs \u00a0\u00a0nbsp\u3000wide \r\n\r\n  \n \n\n\n   \v\f\u0085\u2028\u2029 trailing   ",
	"x = y+z;  // no\n/* a */ /usr/local/bin/ http://example.org/a?b=c&d=%20#e foo_bar__baz--qux $100,000.00 €5 £6 ½ ² Ⅷ ٣ 10ⅷ9",
	"camelCaseWord HTTPServer iPhone15Pro McDonald's O'NEIL'S don’t 'S 'ſ 'Ll 're'RE can'T ʼs ''s ''' s' 'tis",
	"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n<tool_call></tool_call><|endoftext|><|im_sta",
	"<｜begin▁of▁sentence｜><｜User｜>hello<｜Assistant｜><think>ok</think><｜end▁of▁sentence｜> <|EOT|>",
	"<|start|>user<|message|>hello<|end|><|start|>assistant<|channel|>analysis<|message|>",
	"<s>[INST] hello [/INST] fine</s>[AVAILABLE_TOOLS][TOOL_CALLS] <unk> <s> </s> [INST]",
	"▁▁ under ▁line▁ _▁x <0x41><0x0A> ▁",
	"\x00\x01\x1f\x7f\u200b\u200d\ufeff\ufffd\u0378\U000e0041\U0010ffff\ue000 \u00ad",
	"aGVsbG8gd29ybGQhIFRoaXMgaXMgYmFzZTY0Lg== 0xDEADBEEF 3f2504e0-4f89-11d3-9a0c-0305e82c3301 1234567890123456789 3.14159265358979",
	"𐐀𐐨 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟘𝟙𝟚 𒀀𒁉 𓀀 🜁 𑄴 𞤀𞤢 Ꭰꭰ ⴰⵣⵓⵍ አማርኛ ქართული Հայերեն ᠮᠣᠩᠭᠣᠯ မြန်မာ ខ្មែរ ລາວ தமிழ் తెలుగు ಕನ್ನಡ മലയാളം සිංහල བོད་",
	"", " ", "  ", "\n", "\n\n", "a", " a", "a ", "\na", "a\n", "\r", "\r\n", "1", "12", "123", "1234", "'", "'s", " 's", "\t", "/", "\n/", "!/\n/", "!\n\n/x", "中", " 中", "中 ",
}

// pool is what random texts are made of.
var pool = strings.Split("a|b|the|Word|ABC|éa|é|ñ|ß|'|'s|'ll|'LL|’|ſ|1|42|12345|٣|Ⅷ| |  |   |\n|\n\n|\r\n|\r|\t|\u00a0|\u3000|\u2028|\u0085|.|,|!|?|...|(|)|[|]|{|}|\"|/|\\|_|-|--|=|<|>|<\\||\\|>|中|中文|。|，|、|の|カ|ー|・|゛|゙|한|글|\u1100|\u1161|\u11a8|Ж|жизнь|ا|ل|क|्|ष|ท|ี|\u0301|\u0323|\u0327|\u0308|\u200d|\ufe0f|😀|👍|\U0001f3fd|▁|<s>|</s>|<\\|im_end\\|>|<\\|end\\|>|<｜User｜>|[INST]|\x00|\x7f|\u200b|ǅ|ʰ|ª|\U0001d400|\U00010400|\U00020000|𞤢|½|²|€|+|~|^|`|$|%|#|@|&|*|;|:", "|")

// randomText returns n random pieces of the pool and code points.
func randomText(r *rand.Rand, n int) string {
	var b strings.Builder
	for range n {
		switch r.IntN(12) {
		case 0:
			c := rune(r.IntN(0x3100))
			if utf8.ValidRune(c) {
				b.WriteRune(c)
			}
		case 1:
			c := rune(r.IntN(0x110000))
			if utf8.ValidRune(c) {
				b.WriteRune(c)
			}
		case 2:
			p := pool[r.IntN(len(pool))]
			b.WriteString(strings.Repeat(p, r.IntN(6)))
		case 3:
			s := samples[r.IntN(len(samples))]
			if s != "" {
				from := r.IntN(len(s))
				b.WriteString(strings.ToValidUTF8(s[from:min(len(s), from+r.IntN(40))], ""))
			}
		default:
			b.WriteString(strings.TrimSuffix(pool[r.IntN(len(pool))], "\\"))
		}
	}
	return b.String()
}

// goldenTexts returns the documents of the committed goldens.
func goldenTexts() []string {
	r := rand.New(rand.NewPCG(4, 2))
	texts := append([]string(nil), samples...)
	for from := rune(0); from < 0x110000; from += 1024 {
		if from > 0x3ffff && from < 0xe0000 || from > 0xe0fff {
			continue // unassigned or private, all alike
		}
		var b strings.Builder
		for c := from; c < from+1024; c++ {
			if utf8.ValidRune(c) {
				b.WriteRune(c)
			}
			if c%7 == 0 {
				b.WriteString(" a")
			}
		}
		if r.IntN(8) == 0 || from < 0x3400 {
			texts = append(texts, b.String())
		}
	}
	for _, word := range []string{"a", "ab", "中", "\u0301", " ", "\n", "1", "Aa", "ي"} {
		texts = append(texts, strings.Repeat(word, 3000))
	}
	var letters strings.Builder
	for range 5000 {
		fmt.Fprintf(&letters, "%c", 'a'+r.IntN(26))
	}
	texts = append(texts, letters.String())
	for n := range 300 {
		texts = append(texts, randomText(r, 3+n/4))
	}
	return texts
}
